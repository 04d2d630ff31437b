// Backward of the plain attention: dk and dv. attention_plain_dq.cu computes delta and has the launcher.
//
// Names, shapes and layouts are those of the forward (attention_plain.cu):
//   p = exp(s - lse)     ds = p (dout v^T - delta) scale     dv = p^T dout     dk = ds^T q
// A cap c multiplies ds by its slope, 1 - (s / c)^2.
//
//   dqkv    [T, (H + 2 G) D], layout of qkv; this kernel writes the G key heads and G value heads
//   dout    [T, H D], layout of out
//   lse, delta   [H, T] fp32: as attention_plain_dq.cu has corrected them
// qkv, dqkv and dout are aligned to 16 bytes. Outputs are written, not accumulated into. Sums are fp32; dk and dv are
// rounded once. There are no atomics: one block sums over all queries of a group, with heads and rows in ascending
// order.
//
// Grid: a block computes 64 keys of one key/value head (32 at D = 256). For every query head of the group, it iterates
// over the queries from its first row to the last one that sees its last row. 4 products, bound by fp32 arithmetic. 95 KB
// of shared memory at D = 128, 105 KB at D = 256.

#include "attention_tile.cuh"

namespace surogate::attention {
namespace {

constexpr int streamed = 16;  // queries per tile of the loop over queries

template <int D>
constexpr int shared_bytes = (tile_floats<2 * owned<D> + 2 * streamed, D> + tile_floats<2 * owned<D>, streamed>) *
                             static_cast<int>(sizeof(float));

template <int D>
__global__ void __launch_bounds__(threads, 2) attention_dkdv_kernel(Backward<float> tensors, Sizes sizes) {
    extern __shared__ __align__(16) float shared[];
    float* k = shared;
    float* v = k + tile_floats<owned<D>, D>;
    float* q = v + tile_floats<owned<D>, D>;
    float* d = q + tile_floats<streamed, D>;
    float* p = d + tile_floats<streamed, D>;
    float* ds = p + tile_floats<owned<D>, streamed>;
    __shared__ int ends[owned<D>];

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int first = blockIdx.x * owned<D>;  // blocks with the most queries first
    const int end = min(first + owned<D>, sizes.tokens);
    const int group = blockIdx.y, share = sizes.heads / sizes.groups;
    const int key_index = sizes.heads + group, value_index = key_index + sizes.groups;

    if (threadIdx.x < owned<D>) {
        ends[threadIdx.x] = queries_end(tensors.cu_seqlens, sizes, first + threadIdx.x);
    }
    load_tile<owned<D>, D>(k, qkv_head(tensors.qkv, sizes, key_index), first, end);
    load_tile<owned<D>, D>(v, qkv_head(tensors.qkv, sizes, value_index), first, end);
    __syncthreads();

    const int last_query = ends[end - 1 - first];
    Accumulator<D> dk, dv;
    dk.clear();
    dv.clear();

    for (int head = group * share; head < (group + 1) * share; ++head) {
        const auto queries = qkv_head(tensors.qkv, sizes, head);
        const auto gradients = out_head(tensors.dout, sizes, head);
        const int64_t statistics = static_cast<int64_t>(head) * sizes.tokens;
        for (int query = first; query < last_query; query += streamed) {
            __syncthreads();
            load_tile<streamed, D>(q, queries, query, last_query);
            load_tile<streamed, D>(d, gradients, query, last_query);
            __syncthreads();

            float s[rows<D>][1], dp[rows<D>][1];
            multiply_rows<1, D>(k, q, s);
            multiply_rows<1, D>(v, d, dp);
            const int column = query + tx;
            const bool exists = column < last_query;
            const float log_sum = exists ? tensors.corrected_lse[statistics + column] : 0.0f;
            const float column_delta = exists ? tensors.delta[statistics + column] : 0.0f;
#pragma unroll
            for (int i = 0; i < rows<D>; ++i) {
                const int row = ty + 16 * i;
                const bool seen = first + row <= column && column < ends[row];
                float weight, slope = 1.0f;
                if (sizes.softcap > 0) {
                    const float t = tanh_of_score(s[i][0], sizes);
                    weight = seen ? expf(sizes.softcap * t - log_sum) : 0.0f;
                    slope -= t * t;
                } else {
                    weight = seen ? expf(s[i][0] * sizes.scale - log_sum) : 0.0f;
                }
                p[row * (streamed + padding) + tx] = weight;
                ds[row * (streamed + padding) + tx] =
                    seen ? weight * (dp[i][0] - column_delta) * sizes.scale * slope : 0.0f;
            }
            __syncwarp();  // the same half of a warp writes and reads a row of p and ds
            dv.template add_product<streamed>(p, d);
            dk.template add_product<streamed>(ds, q);
        }
    }
    dk.store(qkv_head(tensors.dqkv, sizes, key_index), first, end);
    dv.store(qkv_head(tensors.dqkv, sizes, value_index), first, end);
}

}  // namespace

void attention_dkdv(const Backward<float>& tensors, const Sizes& sizes, const char* op, cudaStream_t stream) {
    dispatch(sizes, [&](auto d) {
        constexpr int D = decltype(d)::value;
        allow_shared_memory(attention_dkdv_kernel<D>, shared_bytes<D>, op);
        attention_dkdv_kernel<D><<<dim3(tiles<D>(sizes), sizes.groups), threads, shared_bytes<D>, stream>>>(tensors, sizes);
        check_launch(op);
    });
}

}  // namespace surogate::attention
