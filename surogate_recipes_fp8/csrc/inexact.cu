// The elements of a weight in E2M1 times powers of two that its copy in E5M2, scaled by a power of two, does not hold.
//
//   u = scale - 127 + log2(encode), encode as in <surogate/e4m3_copy.cuh>
//   count = the elements that are not 0, and of which 2^u times their magnitude is no multiple of 2^-16
//
// A block with u >= -15 has none: of the others alone the codes are read. A scale is read as 2^(code - 127), also the code 255.
//
// Bytes: 1/32 an element. Grid: a thread per block of 32. It runs once, when a weight is loaded.
#include "inexact.h"

#include <surogate/check.h>

#include <surogate/e4m3_copy.cuh>

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr int bias = 127;
constexpr int exact_from = -15;

// The power of two in each magnitude, times 2, by code: 0, 1, 2, 3, 4, 6, 8, 12. Zero is a multiple of all.
__device__ constexpr int twos[8] = {511, 0, 1, 0, 2, 1, 3, 2};

__global__ void __launch_bounds__(threads)
    inexact_kernel(const uint4* codes, const uint8_t* scales, const float2* amax, unsigned* count, int64_t blocks, int matrices) {
    const detail::TensorScale<E5m2Code> own(amax, matrices);
    const int64_t at = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    unsigned found = 0;
    if (at < blocks) {
        const int u = static_cast<int>(scales[at]) - bias + static_cast<int>(__float_as_uint(own.encode) >> 23) - bias;
        if (u < exact_from) {
            const uint4 block = codes[at];
            const uint32_t words[4] = {block.x, block.y, block.z, block.w};
            for (const uint32_t word : words) {
                for (int i = 0; i < 8; ++i) {
                    found += twos[word >> 4 * i & 7u] < exact_from - u;
                }
            }
        }
    }
    found = __reduce_add_sync(full_warp, found);
    if (threadIdx.x % 32 == 0 && found > 0) {
        atomicAdd(count, found);
    }
}

}  // namespace

void fp8_inexact(const void* codes, const void* scales, const void* amax, void* count, int64_t blocks, int64_t matrices,
                 cudaStream_t stream) {
    constexpr const char* op = "fp8_inexact";
    check_positive(blocks, op, "blocks");
    check_pointer(codes, op, "codes", 16);
    check_pointer(scales, op, "scales");
    check_pointer(amax, op, "amax", 8);
    check_pointer(count, op, "count", 4);
    check_cuda(cudaMemsetAsync(count, 0, sizeof(unsigned), stream), op);
    inexact_kernel<<<to_int(ceil_div(blocks, threads), op, "blocks"), threads, 0, stream>>>(
        static_cast<const uint4*>(codes), static_cast<const uint8_t*>(scales), static_cast<const float2*>(amax),
        static_cast<unsigned*>(count), blocks, to_int(matrices, op, "matrices"));
    check_launch(op);
}

}  // namespace surogate
