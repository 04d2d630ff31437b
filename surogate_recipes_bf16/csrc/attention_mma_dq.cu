// Backward of attention by tensor cores: dq, and the launcher that also runs attention_mma_dkdv.cu.
//
// Formulas, names and layouts are those of the plain kernels (attention_plain.cu, attention_plain_dq.cu), with the same
// correction of the rounding of lse and out:
//   p = exp(s - lse)     c = p (dout v^T - rowsum(dout out))     total = rowsum(p)     error = rowsum(c) / total
//   dq = (c k - (error - dlse) p k) scale / total     lse += log(total)     rowsum(dout out) += error - dlse
// and as there, nothing is corrected of an out and lse that are not those of attention (own is false).
// p and c are multiplied by the slope of a cap, 1 - (s / c)^2, where they multiply k. There they are bf16. What rounding adds
// to the sum of c multiplies the part that all keys share, as the rounding of out does, so it is a part of the error of dq.
//
//   dqkv    [T, (H + 2 G) D], layout of qkv; this kernel writes the H query heads
//   dout    [T, H D], layout of out
//   delta, corrected lse   [H, T / chunks] fp32 each, workspace: chunks of tokens run one after another. The corrected
//                          rowsum(dout out), and lse in powers of two, for attention_mma_dkdv.cu
// qkv, dqkv, out and dout are aligned to 16 bytes. Outputs are written, not accumulated into. Sums are fp32; dq is rounded
// once.
//
// Grid: a block computes 64 queries of one query head and iterates over the keys from the first one that its first row sees
// to its last row, 32 at a time. A warp has 16 queries. Of D = 256 two warps have the same 16: one computes
// p k, the other c k. A tile of keys arrives while dout v^T is computed, the next one of values during the other products.
// Shared memory: 24, 36, 48 and 96 KB.
//
// FLOPs: 8 products of 2 T L D a head with those of attention_mma_dkdv.cu, half of them masked, 10 of D = 256; 5 are those
// of the op. 2 x 2,048 tokens, 32 heads of 128: 137 GFLOP, 0.83 ms at the 165 TFLOP/s of an RTX 4090, 0.23 ms at the 0.6 of
// 989 that mma.sync reaches on an H100. A tile of 32 keys and values is 16 KB from L2 for 64 rows: 128 FLOPs a byte, 1.3 TB/s
// on the RTX 4090. Expected, not measured: 0.6 of the first, half of the second.

#include "attention.h"
#include "attention_mma.cuh"

namespace surogate {
namespace {

using namespace attention;
using namespace attention::mma;

// Returns rowsum(dout out) of a row, from four adjacent lanes that all call it.
__device__ __forceinline__ float row_product(const Head<const T>& dout, const Head<const T>& out, int row, bool exists) {
    using V = Vec<T>;
    float sum = 0.0f;
    for (int column = threadIdx.x % 4 * V::size; exists && column < out.columns; column += 4 * V::size) {
        float a[V::size], b[V::size];
        V::load(dout.data + row * dout.stride + column).to_float(a);
        V::load(out.data + row * out.stride + column).to_float(b);
#pragma unroll
        for (int i = 0; i < V::size; ++i) {
            sum = fmaf(a[i], b[i], sum);
        }
    }
    return warp_sum<4>(sum);
}

template <int D>
__global__ void __launch_bounds__(bwd_threads<D>, bwd_blocks<D>)
    attention_mma_dq_kernel(Backward<T> tensors, Sizes sizes) {
    constexpr int columns = bwd_streamed, products = bwd_products<D>;
    extern __shared__ __align__(16) T shared[];
    T* q = shared;
    T* d = q + most_owned * D;
    T* k = d + most_owned * D;
    T* v = k + columns * D;
    __shared__ int starts[most_owned];

    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int of_warp = warp % (most_owned / rows_of_warp) * rows_of_warp;
    const bool multiplies_p = !divided<D> || warp < bwd_warps<D> / 2, multiplies_c = !divided<D> || !multiplies_p;
    const int first = (gridDim.x - 1 - blockIdx.x) * most_owned;  // blocks with the most keys first
    const int end = min(first + most_owned, sizes.tokens);
    const int head = blockIdx.y, group = head / (sizes.heads / sizes.groups);
    const auto keys = qkv_head(tensors.qkv, sizes, sizes.heads + group);
    const auto values = qkv_head(tensors.qkv, sizes, sizes.heads + sizes.groups + group);
    const auto dout = out_head(tensors.dout, sizes, head), out = out_head(tensors.out, sizes, head);
    const Scores scores(sizes);

    copy_tile<most_owned, D, bwd_threads<D>>(q, qkv_head(tensors.qkv, sizes, head), first, end);
    copy_tile<most_owned, D, bwd_threads<D>>(d, dout, first, end);
    if (threadIdx.x < most_owned) {
        starts[threadIdx.x] = first_key(tensors.cu_seqlens, sizes, first + threadIdx.x);
    }
    __syncthreads();
    const int begin = starts[0], begin_of_warp = starts[of_warp];
    copy_tile<columns, D, bwd_threads<D>>(v, values, begin, end);
    commit_copies();

    int start[2];
    float log_sum[2], delta[2], total[2] = {}, excess[2] = {}, rounding[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int of_block = of_warp + lane / 4 + 8 * i, row = first + of_block;
        start[i] = starts[of_block];
        log_sum[i] = row < end ? tensors.lse[head * sizes.lse_row + row] * log2_e : 0.0f;
        delta[i] = row_product(dout, out, row, row < end);
    }
    float sums[products][D / 8][4];  // of p k and c k, or of one of them
    clear(sums);

    for (int key = begin; key < end; key += columns) {
        wait_copies<0>();
        __syncthreads();  // this tile of values is here, and nobody reads the last one of keys
        copy_tile<columns, D, bwd_threads<D>>(k, keys, key, end);
        commit_copies();

        const bool seen_by_warp = key < first + of_warp + rows_of_warp && key + columns > begin_of_warp;
        float s[columns / 8][4], dp[columns / 8][4] = {};
        if (seen_by_warp && multiplies_c) {
            multiply_rows<D, columns>(d + of_warp * D, v, dp);
        }
        wait_copies<0>();
        __syncthreads();  // this tile of keys is here, and nobody reads that of values
        if (key + columns < end) {
            copy_tile<columns, D, bwd_threads<D>>(v, values, key + columns, end);
            commit_copies();
        }
        if (seen_by_warp) {
            multiply_rows<D, columns>(q + of_warp * D, k, s);
            Weights<columns> weights[products];
#pragma unroll
            for (int n = 0; n < columns / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = first + of_warp + lane / 4 + 8 * i;
                    float p[2], c[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int column = key + 8 * n + 2 * (lane % 4) + e;
                        const bool seen = start[i] <= column && column <= row;
                        const float2 score = scores.of(s[n][2 * i + e]);
                        p[e] = seen ? exp2f(score.x - log_sum[i]) : 0.0f;
                        c[e] = seen ? p[e] * (dp[n][2 * i + e] - delta[i]) : 0.0f;
                        total[i] += p[e];
                        excess[i] += c[e];
                        p[e] *= seen ? score.y : 0.0f;
                        c[e] *= seen ? score.y : 0.0f;
                    }
                    if (multiplies_p) {
                        set_weights<columns>(weights[0], n, i, p[0], p[1]);
                    }
                    if (multiplies_c) {
                        rounding[i] += set_weights<columns>(weights[products - 1], n, i, c[0], c[1]);
                    }
                }
            }
            add_products<D, columns, products>(sums, weights, k);
        }
    }

    float error[2], factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = warp_sum<4>(total[i]), of_delta = warp_sum<4>(excess[i]) / sum;
        error[i] = of_delta + warp_sum<4>(rounding[i]) / sum;
        if (!sizes.own) {
            sum = 1.0f, of_delta = error[i] = 0.0f;
        }
        factors[i] = sizes.scale / sum;
        const int row = first + of_warp + lane / 4 + 8 * i;
        if (tensors.dlse && row < end) {
            const float given = tensors.dlse[head * sizes.lse_row + row];
            of_delta -= given;
            error[i] -= given;
        }
        if (multiplies_c && row < end && lane % 4 == 0) {
            const int64_t at = static_cast<int64_t>(head) * sizes.tokens + row;
            tensors.delta[at] = delta[i] + of_delta;
            tensors.corrected_lse[at] = log_sum[i] + log2f(sum);
        }
    }
    const auto subtract = [&](int n, const float (&of_p)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[products - 1][n][e] -= error[e / 2] * of_p[e];
        }
    };
    if constexpr (divided<D>) {
        __syncthreads();  // nobody reads q and d, which have the size of the sums of four warps
        float4* sent = reinterpret_cast<float4*>(shared) + of_warp / rows_of_warp * (D / 8) * 32 + lane;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            if (multiplies_p) {
                sent[n * 32] = make_float4(sums[0][n][0], sums[0][n][1], sums[0][n][2], sums[0][n][3]);
            }
        }
        __syncthreads();
        if (multiplies_p) {
            return;
        }
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            const float4 of_p = sent[n * 32];
            subtract(n, {of_p.x, of_p.y, of_p.z, of_p.w});
        }
    } else {
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            subtract(n, sums[0][n]);
        }
    }
    store_rows(sums[products - 1], factors, qkv_head(tensors.dqkv, sizes, head), first + of_warp, end);
}

}  // namespace

void attention_mma_bwd(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens, const void* dlse,
                       void* dqkv, void* workspace, int64_t tokens, int64_t documents, int64_t heads, int64_t kv_heads,
                       int64_t head_dim, int64_t window, double scale, double softcap, bool own, int64_t chunks,
                       cudaStream_t stream) {
    constexpr auto op = "attention_mma_bwd";
    const auto tensors = backward_of<T>(dout, qkv, out, lse, cu_seqlens, dlse, dqkv, workspace);
    Sizes whole = checked_sizes(tokens, documents, heads, kv_heads, head_dim, window, scale, softcap, op);
    whole.own = own;
    in_chunks(tensors, whole, chunks, op, [&](const Backward<T>& chunk, const Sizes& sizes) {
        dispatch(sizes, [&](auto d) {
            constexpr int D = decltype(d)::value;
            allow_shared_memory(attention_mma_dq_kernel<D>, bwd_shared_bytes<D>, op);
            const auto tiles = static_cast<unsigned>(ceil_div(sizes.tokens, most_owned));
            attention_mma_dq_kernel<D><<<dim3(tiles, sizes.heads), bwd_threads<D>, bwd_shared_bytes<D>, stream>>>(
                chunk, sizes);
            check_launch(op);
        });
        attention_dkdv(chunk, sizes, op, stream);
    });
}

}  // namespace surogate
