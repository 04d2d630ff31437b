// Attention in fp32, on SM80 and later. It favours correctness over speed. This file has the forward kernel. The backward
// kernels are in attention_plain_dq.cu and attention_plain_dkdv.cu, the shared code in attention_tile.cuh and
// attention_rows.cuh.
//
// Causal attention within each document, H query heads that share G key/value heads (query head h uses h / (H / G)):
//   s = q k^T scale     lse = log sum exp s     p = exp(s - lse)     out = p v
// With a window of W > 0 query i sees the keys i - W + 1 to i of its document. With a cap c > 0,
// s = c tanh(q k^T scale / c).
//
//   qkv          [T, (H + 2 G) D] fp32; columns: H query heads, G key heads, G value heads
//   out          [T, H D] fp32
//   lse          [H, T] fp32, natural logarithm
//   cu_seqlens   [documents + 1] int32 in device memory, ascending from 0 to T; a document may be empty
// Outputs are written, not accumulated into. D is a multiple of 8 up to 256. Kernels are compiled for 32, 64, 96, 128
// and 256; other sizes cost as much as the next larger one. qkv and out are aligned to 16 bytes. Sums are fp32 and each
// output is rounded once. There are no atomics, so results are bit-identical from run to run.
//
// Grid: a block computes 64 queries of one query head (32 at D = 256) and iterates over the keys from the first one that
// its first row sees to its last row. No memory grows with T^2. The kernel is bound by fp32 arithmetic (2 products), not
// by bandwidth. It uses 77 KB of shared memory at D = 128 (the backward 95 KB) and 69 KB at D = 256, which fits on SM86
// and SM120; the backward takes 105 KB at D = 256, which does not.

#include "attention.h"
#include "attention_tile.cuh"
#include "surogate/reduce.cuh"

namespace surogate {
namespace {

using namespace attention;

template <int D>
constexpr int streamed_keys = D > 128 ? 16 : 32;  // keys per tile of the loop over keys

template <int D>
constexpr int shared_bytes =
    (tile_floats<owned<D> + 2 * streamed_keys<D>, D> + tile_floats<owned<D>, streamed_keys<D>>) *
    static_cast<int>(sizeof(float));

// Online softmax over the key tiles: running maximum and sum of a row. Earlier sums are rescaled when the maximum
// rises.
template <int D>
__global__ void __launch_bounds__(threads, 2)
    attention_kernel(const float* qkv, const int* cu_seqlens, float* out, float* lse, Sizes sizes) {
    constexpr int streamed = streamed_keys<D>;
    extern __shared__ __align__(16) float shared[];
    float* q = shared;
    float* k = q + tile_floats<owned<D>, D>;
    float* v = k + tile_floats<streamed, D>;
    float* p = v + tile_floats<streamed, D>;
    __shared__ int starts[owned<D>];

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int first = (gridDim.x - 1 - blockIdx.x) * owned<D>;  // blocks with the most keys first
    const int end = min(first + owned<D>, sizes.tokens);
    const int head = blockIdx.y, group = head / (sizes.heads / sizes.groups);
    const auto keys = qkv_head(qkv, sizes, sizes.heads + group);
    const auto values = qkv_head(qkv, sizes, sizes.heads + sizes.groups + group);

    if (threadIdx.x < owned<D>) {
        starts[threadIdx.x] = first_key(cu_seqlens, sizes, first + threadIdx.x);
    }
    load_tile<owned<D>, D>(q, qkv_head(qkv, sizes, head), first, end);
    __syncthreads();

    float highest[rows<D>], total[rows<D>];
    Accumulator<D> sums;
    sums.clear();
#pragma unroll
    for (int i = 0; i < rows<D>; ++i) {
        highest[i] = -INFINITY;
        total[i] = 0.0f;
    }

    for (int key = starts[0]; key < end; key += streamed) {
        __syncthreads();
        load_tile<streamed, D>(k, keys, key, end);
        load_tile<streamed, D>(v, values, key, end);
        __syncthreads();

        constexpr int columns = streamed / 16;
        float s[rows<D>][columns];
        multiply_rows<columns, D>(q, k, s);
#pragma unroll
        for (int i = 0; i < rows<D>; ++i) {
            const int row = ty + 16 * i;
            float largest = -INFINITY;
#pragma unroll
            for (int j = 0; j < columns; ++j) {
                const int column = key + tx + 16 * j;
                const bool seen = starts[row] <= column && column <= first + row;
                const float score =
                    sizes.softcap > 0 ? sizes.softcap * tanh_of_score(s[i][j], sizes) : s[i][j] * sizes.scale;
                s[i][j] = seen ? score : -INFINITY;
                largest = Max{}(largest, s[i][j]);
            }
            const float raised = Max{}(highest[i], warp_max<16>(largest));
            // Nothing to rescale for a row without a key so far, because its document starts later.
            const float shift = raised == -INFINITY ? 0.0f : raised;
            const float factor = expf(highest[i] - shift);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < columns; ++j) {
                const float weight = expf(s[i][j] - shift);
                p[row * (streamed + padding) + tx + 16 * j] = weight;
                sum += weight;
            }
            highest[i] = raised;
            total[i] = total[i] * factor + warp_sum<16>(sum);
            sums.scale_row(i, factor);
        }
        __syncwarp();  // the same half of a warp writes and reads a row of p
        sums.template add_product<streamed>(p, v);
    }

#pragma unroll
    for (int i = 0; i < rows<D>; ++i) {
        const int row = first + ty + 16 * i;
        sums.scale_row(i, 1.0f / total[i]);
        if (tx == 0 && row < end) {
            lse[static_cast<int64_t>(head) * sizes.tokens + row] = highest[i] + logf(total[i]);
        }
    }
    sums.store(out_head(out, sizes, head), first, end);
}

template <int D>
void launch(const void* qkv, const void* cu_seqlens, void* out, void* lse, const Sizes& sizes, cudaStream_t stream) {
    allow_shared_memory(attention_kernel<D>, shared_bytes<D>, "attention_plain");
    attention_kernel<D><<<dim3(tiles<D>(sizes), sizes.heads), threads, shared_bytes<D>, stream>>>(
        static_cast<const float*>(qkv), static_cast<const int*>(cu_seqlens), static_cast<float*>(out),
        static_cast<float*>(lse), sizes);
    check_launch("attention_plain");
}

}  // namespace

void attention_plain(const void* qkv, const void* cu_seqlens, void* out, void* lse, int64_t tokens, int64_t documents,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, double scale, double softcap,
                     cudaStream_t stream) {
    constexpr auto op = "attention_plain";
    check_forward(qkv, cu_seqlens, out, lse, op);
    const Sizes sizes = checked_sizes(tokens, documents, heads, kv_heads, head_dim, window, scale, softcap, op);
    dispatch(sizes, [&](auto d) { launch<decltype(d)::value>(qkv, cu_seqlens, out, lse, sizes, stream); });
}

}  // namespace surogate
