// The 2-norm over a list of tensors and the clipping coefficient, without host synchronization, in two launches. Between them
// ranks that have parts of the tensors exchange their sums.
//
// square_sums: the sum of squares of each chunk.
//
//   table      [tensors, 5] int64: address, number of elements, index of the first chunk, dtype (FP32 or BF16), elements of a
//              chunk, a multiple of 8. Chunks are numbered consecutively over all tensors; a tensor of `size` elements has
//              ceil(size / elements of a chunk).
//   sums       [chunks] fp64, written
//
// norm_of_sums: sums of chunks to
//
//   norm = sqrt(sum of x^2 over all elements)
//   clip_coef = 1 if max_norm is 0, otherwise min(1, max_norm / (norm + 1e-6)); NaN if the norm is not finite
//
//   sums       fp64
//   order      [count] int64: the indices of the sums to add; null: the first `count`
//   norm, clip_coef  fp32 scalars, written
//
// Any size. Tensors are aligned to their element; those aligned to 16 bytes are read in 16-byte vectors.
// Grid: one block per chunk. A thread sums the squares of its elements in eight fp32 sums of 1/2048 of a chunk each, or one
// element. The block adds these in fp64 and writes one sum. A single block then adds the sums in fp64, by their
// place in `order`. So a sum depends on the elements of its chunk alone: zeros may follow the last one. The norm depends on
// the sums and their order alone, and both are bit-identical from run to run and on every device. Squares of values above
// 1.8e19 overflow fp32, as in the reference; such a gradient has no finite norm.
// Bytes moved per element: 4 (fp32) or 2 (bf16). Expected: 90 % of bandwidth with large chunks.
#include <cuda_bf16.h>

#include <cstdint>

#include "reductions.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"
#include "surogate/reduce.cuh"

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr int norm_threads = 1024;

struct Entry {
    const void* address;
    int64_t size;
    int64_t first_chunk;
    int64_t dtype;
    int64_t chunk_size;
};
static_assert(sizeof(Entry) == 5 * sizeof(int64_t));

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

__global__ void __launch_bounds__(threads) square_sums_kernel(const Entry* table, double* sums, int64_t tensors) {
    __shared__ double scratch[32];
    // Chunk blockIdx.x belongs to the last tensor whose first chunk is at or before it. An empty tensor has the same
    // first chunk as the next tensor.
    int64_t begun = 0;
    for (int64_t base = 0; base < tensors; base += threads) {
        const int64_t i = base + threadIdx.x;
        begun += __syncthreads_count(i < tensors && table[i].first_chunk <= blockIdx.x);
    }
    const Entry entry = table[begun - 1];
    const int64_t begin = (blockIdx.x - entry.first_chunk) * entry.chunk_size;
    const int64_t end = min(begin + entry.chunk_size, entry.size);
    double sum = entry.dtype == BF16 ? squares(static_cast<const __nv_bfloat16*>(entry.address), begin, end)
                                     : squares(static_cast<const float*>(entry.address), begin, end);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
    }
}

__global__ void __launch_bounds__(norm_threads)
    norm_of_sums_kernel(const double* sums, const int64_t* order, float* norm, float* clip_coef, int64_t count,
                        float max_norm) {
    __shared__ double scratch[32];
    double sum = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += norm_threads) {
        sum += sums[order == nullptr ? i : order[i]];
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

void square_sums(const void* table, void* sums, int64_t tensors, int64_t chunks, cudaStream_t stream) {
    constexpr const char* op = "square_sums";
    check_pointer(table, op, "table", 8);
    check_pointer(sums, op, "sums", 8);
    check_positive(tensors, op, "tensors");
    check_positive(chunks, op, "chunks");
    square_sums_kernel<<<to_int(chunks, op, "chunks"), threads, 0, stream>>>(static_cast<const Entry*>(table),
                                                                             static_cast<double*>(sums), tensors);
    check_launch(op);
}

void norm_of_sums(const void* sums, const void* order, void* norm, void* clip_coef, int64_t count, double max_norm,
                  cudaStream_t stream) {
    constexpr const char* op = "norm_of_sums";
    check_pointer(sums, op, "sums", 8);
    SUROGATE_REQUIRE(is_aligned(order, 8), op, "order must be aligned to 8 bytes");
    check_pointer(norm, op, "norm", 4);
    check_pointer(clip_coef, op, "clip_coef", 4);
    check_positive(count, op, "count");
    SUROGATE_REQUIRE(max_norm >= 0, op, "max_norm must not be negative, got " + std::to_string(max_norm));
    norm_of_sums_kernel<<<1, norm_threads, 0, stream>>>(static_cast<const double*>(sums),
                                                        static_cast<const int64_t*>(order), static_cast<float*>(norm),
                                                        static_cast<float*>(clip_coef), count,
                                                        static_cast<float>(max_norm));
    check_launch(op);
}

}  // namespace surogate
