// Attention in bf16 by tensor cores (mma.sync), for SM80 and later: every case of attention_plain.cu, whose formulas and
// layouts these are, for what cuDNN does not serve. This file has the forward kernel. The backward kernels are in
// attention_mma_dq.cu and attention_mma_dkdv.cu, the shared code in attention_mma.cuh and attention_rows.cuh.
//
//   qkv          [T, (H + 2 G) D] bf16; columns: H query heads, G key heads, G value heads
//   out          [T, H D] bf16
//   lse          [H, T] fp32, natural logarithm
//   cu_seqlens   [documents + 1] int32 in device memory, ascending from 0 to T; a document may be empty
// Outputs are written, not accumulated into. D is a multiple of 8 up to 256. Kernels are compiled for 64, 96, 128 and 256;
// other sizes cost as much as the next larger one. qkv and out are aligned to 16 bytes. Products have bf16 operands and fp32
// sums: p is rounded to bf16 before it is multiplied, its sum is not. There are no atomics, so results are bit-identical
// from run to run.
//
// Grid: a block computes 64 queries of one query head (128 of D = 256), 16 in each warp, and iterates over the keys from the
// first one that its first row sees to its last row, 64 at a time (32 of D = 256). A tile of values arrives while scores are
// computed, the next one of keys while p is multiplied. Shared memory: 24, 36, 48 and 96 KB, so that two blocks of D = 128
// are on an SM of 100 KB.
//
// Floor: 4 T L H D FLOPs for documents of L tokens, half of them masked, against 2 T (2 H + 2 G) D bytes: bound by products
// from documents of a few hundred tokens on. 2 x 2,048 tokens, 32 heads of 128: 34 GFLOP, 0.21 ms at the 165 TFLOP/s of an
// RTX 4090, 0.06 ms at the 0.6 of 989 that mma.sync reaches on an H100. Expected, not measured: 0.6 to 0.7 of the first,
// half of the second, where ldmatrix takes as long as the products of 16 rows.

#include "attention.h"
#include "attention_mma.cuh"

namespace surogate {
namespace {

using namespace attention;
using namespace attention::mma;

template <int D>
constexpr int warps = D > 128 ? 8 : 4;
template <int D>
constexpr int threads = 32 * warps<D>;
template <int D>
constexpr int owned = rows_of_warp * warps<D>;
template <int D>
constexpr int streamed = D > 128 ? 32 : 64;  // keys per tile of the loop over keys
template <int D>
constexpr int shared_bytes = (owned<D> + 2 * streamed<D>) * D * static_cast<int>(sizeof(T));

// Online softmax over the key tiles: running maximum and sum of a row. Earlier sums are rescaled when the maximum rises.
template <int D>
__global__ void __launch_bounds__(threads<D>, D > 128 ? 1 : 2)
    attention_mma_kernel(const T* qkv, const int* cu_seqlens, T* out, float* lse, Sizes sizes) {
    constexpr int columns = streamed<D>;
    extern __shared__ __align__(16) T shared[];
    T* q = shared;
    T* k = q + owned<D> * D;
    T* v = k + columns * D;
    __shared__ int starts[owned<D>];

    const int lane = threadIdx.x % 32, of_warp = static_cast<int>(threadIdx.x) / 32 * rows_of_warp;
    const int first = (gridDim.x - 1 - blockIdx.x) * owned<D>;  // blocks with the most keys first
    const int end = min(first + owned<D>, sizes.tokens);
    const int head = blockIdx.y, group = head / (sizes.heads / sizes.groups);
    const auto keys = qkv_head(qkv, sizes, sizes.heads + group);
    const auto values = qkv_head(qkv, sizes, sizes.heads + sizes.groups + group);
    const Scores scores(sizes);

    copy_tile<owned<D>, D, threads<D>>(q, qkv_head(qkv, sizes, head), first, end);
    if (threadIdx.x < owned<D>) {
        starts[threadIdx.x] = first_key(cu_seqlens, sizes, first + threadIdx.x);
    }
    __syncthreads();
    const int begin = starts[0], begin_of_warp = starts[of_warp];
    const int start[2] = {starts[of_warp + lane / 4], starts[of_warp + lane / 4 + 8]};
    copy_tile<columns, D, threads<D>>(k, keys, begin, end);
    commit_copies();

    float highest[2] = {-INFINITY, -INFINITY}, total[2] = {};
    float sums[1][D / 8][4];
    clear(sums);

    for (int key = begin; key < end; key += columns) {
        wait_copies<0>();
        __syncthreads();  // this tile of keys is here, and nobody reads the last one of values
        copy_tile<columns, D, threads<D>>(v, values, key, end);
        commit_copies();

        const bool seen_by_warp = key < first + of_warp + rows_of_warp && key + columns > begin_of_warp;
        Weights<columns> p[1];
        if (seen_by_warp) {
            float s[columns / 8][4];
            multiply_rows<D, columns>(q + of_warp * D, k, s);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = first + of_warp + lane / 4 + 8 * i;
                float largest = -INFINITY;
#pragma unroll
                for (int n = 0; n < columns / 8; ++n) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int column = key + 8 * n + 2 * (lane % 4) + e;
                        const bool seen = start[i] <= column && column <= row;
                        float& score = s[n][2 * i + e];
                        score = seen ? scores.of(score).x : -INFINITY;
                        largest = Max{}(largest, score);
                    }
                }
                const float raised = Max{}(highest[i], warp_max<4>(largest));
                // Nothing to rescale for a row without a key so far, because its document starts later.
                const float shift = raised == -INFINITY ? 0.0f : raised;
                const float factor = exp2f(highest[i] - shift);
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < columns / 8; ++n) {
                    const float a = exp2f(s[n][2 * i] - shift), b = exp2f(s[n][2 * i + 1] - shift);
                    set_weights<columns>(p[0], n, i, a, b);
                    sum += a + b;
                }
                highest[i] = raised;
                total[i] = total[i] * factor + sum;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    sums[0][n][2 * i] *= factor;
                    sums[0][n][2 * i + 1] *= factor;
                }
            }
        }

        wait_copies<0>();
        __syncthreads();  // this tile of values is here, and nobody reads that of keys
        if (key + columns < end) {
            copy_tile<columns, D, threads<D>>(k, keys, key + columns, end);
            commit_copies();
        }
        if (seen_by_warp) {
            add_products<D, columns, 1>(sums, p, v);
        }
    }

    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first + of_warp + lane / 4 + 8 * i;
        const float sum = warp_sum<4>(total[i]);
        factors[i] = 1.0f / sum;
        if (lane % 4 == 0 && row < end) {
            lse[static_cast<int64_t>(head) * sizes.tokens + row] = highest[i] / log2_e + logf(sum);
        }
    }
    store_rows(sums[0], factors, out_head(out, sizes, head), first + of_warp, end);
}

template <int D>
void launch(const void* qkv, const void* cu_seqlens, void* out, void* lse, const Sizes& sizes, cudaStream_t stream) {
    allow_shared_memory(attention_mma_kernel<D>, shared_bytes<D>, "attention_mma");
    const auto tiles = static_cast<unsigned>(ceil_div(sizes.tokens, owned<D>));
    attention_mma_kernel<D><<<dim3(tiles, sizes.heads), threads<D>, shared_bytes<D>, stream>>>(
        static_cast<const T*>(qkv), static_cast<const int*>(cu_seqlens), static_cast<T*>(out),
        static_cast<float*>(lse), sizes);
    check_launch("attention_mma");
}

}  // namespace

void attention_mma(const void* qkv, const void* cu_seqlens, void* out, void* lse, int64_t tokens, int64_t documents,
                   int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, double scale, double softcap,
                   cudaStream_t stream) {
    constexpr auto op = "attention_mma";
    check_forward(qkv, cu_seqlens, out, lse, op);
    const Sizes sizes = checked_sizes(tokens, documents, heads, kv_heads, head_dim, window, scale, softcap, op);
    dispatch(sizes, [&](auto d) { launch<decltype(d)::value>(qkv, cu_seqlens, out, lse, sizes, stream); });
}

}  // namespace surogate
