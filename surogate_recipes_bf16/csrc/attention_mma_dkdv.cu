// Backward of attention by tensor cores: dk and dv. attention_mma_dq.cu has formulas, FLOPs and the launcher.
//
//   p = exp(s - lse)     c = p (dout v^T - delta)     dv = p^T dout     dk = c^T q scale
// where c is multiplied by the slope of a cap, 1 - (s / c)^2. p and c are rounded to bf16.
//
//   dqkv    [T, (H + 2 G) D], layout of qkv; this kernel writes the G key heads and G value heads
//   dout    [T, H D], layout of out
//   lse, delta   [H, T] fp32: as attention_mma_dq.cu has corrected them, lse in powers of two
// qkv, dqkv and dout are aligned to 16 bytes. Outputs are written, not accumulated into. Sums are fp32; dk and dv are
// rounded once. There are no atomics: one block sums over all queries of a group, with heads and rows in ascending order.
//
// Grid: a block computes 64 keys of one key/value head. For every query head of the group, it iterates over the queries from
// its first row to the last one that sees its last row, 32 at a time. Scores are transposed: a warp has 16 keys
// as rows. Of D = 256 two warps have the same 16: one computes dv, the other dk. A tile of queries arrives while dout v^T
// is computed, the next one of dout while dk is. Shared memory: 24, 36, 48 and 96 KB.

#include "attention_mma.cuh"

namespace surogate::attention::mma {
namespace {

template <int D>
__global__ void __launch_bounds__(bwd_threads<D>, bwd_blocks<D>)
    attention_mma_dkdv_kernel(Backward<T> tensors, Sizes sizes) {
    constexpr int columns = bwd_streamed, products = bwd_products<D>;
    extern __shared__ __align__(16) T shared[];
    T* k = shared;
    T* v = k + most_owned * D;
    T* q = v + most_owned * D;
    T* d = q + columns * D;
    __shared__ int ends[most_owned];
    __shared__ float log_sums[columns], deltas[columns];  // of the streamed queries

    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int of_warp = warp % (most_owned / rows_of_warp) * rows_of_warp;
    const bool computes_dv = !divided<D> || warp < bwd_warps<D> / 2, computes_dk = !divided<D> || !computes_dv;
    const int first = blockIdx.x * most_owned;  // blocks with the most queries first
    const int end = min(first + most_owned, sizes.tokens);
    const int group = blockIdx.y, share = sizes.heads / sizes.groups;
    const int key_index = sizes.heads + group, value_index = key_index + sizes.groups;
    const Scores scores(sizes);

    copy_tile<most_owned, D, bwd_threads<D>>(k, qkv_head(tensors.qkv, sizes, key_index), first, end);
    copy_tile<most_owned, D, bwd_threads<D>>(v, qkv_head(tensors.qkv, sizes, value_index), first, end);
    if (threadIdx.x < most_owned) {
        ends[threadIdx.x] = queries_end(tensors.cu_seqlens, sizes, first + threadIdx.x);
    }
    __syncthreads();
    const int last_query = ends[end - 1 - first];
    const int last_of_warp = first + of_warp < end ? ends[min(of_warp + rows_of_warp, end - first) - 1] : 0;
    const int row_end[2] = {ends[of_warp + lane / 4], ends[of_warp + lane / 4 + 8]};

    int head = group * share, query = first;
    const auto copy_dout = [&] {
        copy_tile<columns, D, bwd_threads<D>>(d, out_head(tensors.dout, sizes, head), query, last_query);
        commit_copies();
    };
    copy_dout();

    float sums[products][D / 8][4];  // of dv and dk, or of one of them
    clear(sums);

    while (head < (group + 1) * share) {
        wait_copies<0>();
        __syncthreads();  // this tile of dout is here, and nobody reads the last one of queries and their statistics
        copy_tile<columns, D, bwd_threads<D>>(q, qkv_head(tensors.qkv, sizes, head), query, last_query);
        if (threadIdx.x < columns) {
            const int row = query + static_cast<int>(threadIdx.x);
            const bool exists = row < last_query;
            const int64_t at = exists ? static_cast<int64_t>(head) * sizes.tokens + row : 0;
            copy_async<4>(log_sums + threadIdx.x, tensors.corrected_lse + at, exists);
            copy_async<4>(deltas + threadIdx.x, tensors.delta + at, exists);
        }
        commit_copies();

        const bool seen_by_warp = query + columns > first + of_warp && query < last_of_warp;
        float s[columns / 8][4], dp[columns / 8][4] = {};
        if (seen_by_warp && computes_dk) {
            multiply_rows<D, columns>(v + of_warp * D, d, dp);
        }
        wait_copies<0>();
        __syncthreads();  // this tile of queries and their statistics are here
        Weights<columns> weights[2];
        if (seen_by_warp) {
            multiply_rows<D, columns>(k + of_warp * D, q, s);
#pragma unroll
            for (int n = 0; n < columns / 8; ++n) {
                const int of_tile = 8 * n + 2 * (lane % 4);
                const float log_sum[2] = {log_sums[of_tile], log_sums[of_tile + 1]};
                const float delta[2] = {deltas[of_tile], deltas[of_tile + 1]};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = first + of_warp + lane / 4 + 8 * i;
                    float p[2], c[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int column = query + of_tile + e;
                        const bool seen = row <= column && column < row_end[i];
                        const float2 score = scores.of(s[n][2 * i + e]);
                        p[e] = seen ? exp2f(score.x - log_sum[e]) : 0.0f;
                        c[e] = seen ? p[e] * (dp[n][2 * i + e] - delta[e]) * score.y : 0.0f;
                    }
                    set_weights<columns>(weights[0], n, i, p[0], p[1]);
                    set_weights<columns>(weights[1], n, i, c[0], c[1]);
                }
            }
            if (computes_dv) {
                add_products<D, columns, 1>(sums, weights, d);
            }
        }
        __syncthreads();  // nobody reads this tile of dout
        query += columns;
        if (query >= last_query) {
            query = first;
            ++head;
        }
        if (head < (group + 1) * share) {
            copy_dout();
        }
        if (seen_by_warp && computes_dk) {
            add_products<D, columns, 1>(sums + products - 1, weights + 1, q);
        }
    }

    if (computes_dk) {
        const float factors[2] = {sizes.scale, sizes.scale};
        store_rows(sums[products - 1], factors, qkv_head(tensors.dqkv, sizes, key_index), first + of_warp, end);
    }
    if (computes_dv) {
        const float factors[2] = {1.0f, 1.0f};
        store_rows(sums[0], factors, qkv_head(tensors.dqkv, sizes, value_index), first + of_warp, end);
    }
}

}  // namespace

void attention_dkdv(const Backward<T>& tensors, const Sizes& sizes, const char* op, cudaStream_t stream) {
    dispatch(sizes, [&](auto d) {
        constexpr int D = decltype(d)::value;
        allow_shared_memory(attention_mma_dkdv_kernel<D>, bwd_shared_bytes<D>, op);
        const auto tiles = static_cast<unsigned>(ceil_div(sizes.tokens, most_owned));
        attention_mma_dkdv_kernel<D><<<dim3(tiles, sizes.groups), bwd_threads<D>, bwd_shared_bytes<D>, stream>>>(
            tensors, sizes);
        check_launch(op);
    });
}

}  // namespace surogate::attention::mma
