// global_norm: the 2-norm over a list of tensors and the clipping coefficient, without host synchronization.
//
//   norm = sqrt(sum of x^2 over all elements)
//   clip_coef = 1 if max_norm is 0, otherwise min(1, max_norm / (norm + 1e-6)); NaN if the norm is not finite
//
//   table      [tensors, 4] int64: address, number of elements, index of the first chunk, dtype (FP32 or BF16). Chunks
//              are numbered consecutively over all tensors; a tensor of `size` elements has ceil(size / chunk_size).
//   partials   [chunks] fp64, workspace
//   norm, clip_coef  fp32 scalars, written
//
// Any size. Tensors are aligned to their element; those aligned to 16 bytes are read in 16-byte vectors.
// Grid: one block per chunk. A thread sums the squares of its elements in eight fp32 sums of chunk_size / 2048 terms
// each. The block adds these in fp64 and writes one partial sum. A single block then adds the partial sums in fp64. The
// order depends only on the sizes, so results are bit-identical from run to run and on every device. Squares of values
// above 1.8e19 overflow fp32, as in the reference; such a gradient has no finite norm.
// Bytes moved per element: 4 (fp32) or 2 (bf16). Expected: 90 % of bandwidth.
#include <cuda_bf16.h>

#include <cstdint>

#include "reductions.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"
#include "surogate/reduce.cuh"

namespace surogate {
namespace {

constexpr const char* op = "global_norm";
constexpr int threads = 256;
constexpr int total_threads = 1024;

struct Entry {
    const void* address;
    int64_t size;
    int64_t first_chunk;
    int64_t dtype;
};
static_assert(sizeof(Entry) == 4 * sizeof(int64_t));

// Returns the sum of squares of this thread's share of [begin, end). `begin` must be a multiple of 8.
template <class T>
__device__ double squares(const T* x, int64_t begin, int64_t end) {
    const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
    float sums[octet] = {};
#pragma unroll 4
    for (int64_t i = begin + threadIdx.x * octet; i < end; i += threads * octet) {
        float values[octet];
        load_octet(x + i, values, end - i, aligned && end - i >= octet);
#pragma unroll
        for (int k = 0; k < octet; ++k) {
            sums[k] = fmaf(values[k], values[k], sums[k]);
        }
    }
    double total = 0;
#pragma unroll
    for (int k = 0; k < octet; ++k) {
        total += sums[k];
    }
    return total;
}

__global__ void __launch_bounds__(threads)
    global_norm_partials_kernel(const Entry* table, double* partials, int64_t tensors, int64_t chunk_size) {
    __shared__ double scratch[32];
    // Chunk blockIdx.x belongs to the last tensor whose first chunk is at or before it. An empty tensor has the same
    // first chunk as the next tensor.
    int64_t begun = 0;
    for (int64_t base = 0; base < tensors; base += threads) {
        const int64_t i = base + threadIdx.x;
        begun += __syncthreads_count(i < tensors && table[i].first_chunk <= blockIdx.x);
    }
    const Entry entry = table[begun - 1];
    const int64_t begin = (blockIdx.x - entry.first_chunk) * chunk_size;
    const int64_t end = min(begin + chunk_size, entry.size);
    double sum = entry.dtype == BF16 ? squares(static_cast<const __nv_bfloat16*>(entry.address), begin, end)
                                     : squares(static_cast<const float*>(entry.address), begin, end);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

__global__ void __launch_bounds__(total_threads)
    global_norm_total_kernel(const double* partials, float* norm, float* clip_coef, int64_t chunks, float max_norm) {
    __shared__ double scratch[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < chunks; i += total_threads) {
        sum += partials[i];
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        const float root = static_cast<float>(sqrt(sum));
        // torch divides a number by a tensor by multiplying with the rounded reciprocal.
        const float ratio = max_norm * __frcp_rn(root + 1e-6f);
        const float coef = max_norm == 0 ? 1.0f : fminf(ratio, 1.0f);
        *norm = root;
        *clip_coef = isfinite(root) ? coef : nanf("");
    }
}

}  // namespace

void global_norm(const void* table, void* norm, void* clip_coef, void* partials, int64_t tensors, int64_t chunks,
                 int64_t chunk_size, double max_norm, cudaStream_t stream) {
    check_pointer(table, op, "table", 8);
    check_pointer(norm, op, "norm", 4);
    check_pointer(clip_coef, op, "clip_coef", 4);
    check_pointer(partials, op, "partials", 8);
    check_positive(tensors, op, "tensors");
    check_positive(chunks, op, "chunks");
    check_positive(chunk_size, op, "chunk_size");
    SUROGATE_REQUIRE(chunk_size % octet == 0, op,
                     "chunk_size must be a multiple of 8, got " + std::to_string(chunk_size));
    SUROGATE_REQUIRE(max_norm >= 0, op, "max_norm must not be negative, got " + std::to_string(max_norm));
    global_norm_partials_kernel<<<to_int(chunks, op, "chunks"), threads, 0, stream>>>(
        static_cast<const Entry*>(table), static_cast<double*>(partials), tensors, chunk_size);
    check_launch(op);
    global_norm_total_kernel<<<1, total_threads, 0, stream>>>(static_cast<const double*>(partials),
                                                              static_cast<float*>(norm), static_cast<float*>(clip_coef),
                                                              chunks, static_cast<float>(max_norm));
    check_launch(op);
}

}  // namespace surogate
