// round_sum: out = sum, rounded to nearest even.
//
// sum  fp32 [size], out  bf16 [size]; both aligned to 16 bytes
//
// A thread per eight elements. 6 bytes per element, at 85-90 % of bandwidth: once per run of a head, if at all.

#include <cuda_bf16.h>

#include "surogate/check.h"
#include "surogate/lm_head.h"
#include "surogate/octet.cuh"

namespace surogate {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    round_sum_kernel(const float* __restrict__ sum, __nv_bfloat16* __restrict__ out, int64_t size) {
    const int64_t begin = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) * octet;
    const int64_t count = size - begin;
    if (count <= 0) {
        return;
    }
    float values[octet];
    load_octet(sum + begin, values, count, count >= octet);
    store_octet(out + begin, values, count, count >= octet);
}

}  // namespace

void round_sum(const void* sum, void* out, int64_t size, cudaStream_t stream) {
    constexpr const char* op = "round_sum";
    check_pointer(sum, op, "sum", 16);
    check_pointer(out, op, "out", 16);
    check_positive(size, op, "size");
    const int grid = to_int(ceil_div(size, octet * threads), op, "size / 2048");
    round_sum_kernel<<<grid, threads, 0, stream>>>(static_cast<const float*>(sum), static_cast<__nv_bfloat16*>(out),
                                                   size);
    check_launch(op);
}

}  // namespace surogate
