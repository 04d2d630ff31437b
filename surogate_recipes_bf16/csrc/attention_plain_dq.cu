// Backward of the plain attention: delta and dq, and the launcher that also runs attention_plain_dkdv.cu.
//
// Names, shapes and layouts are those of the forward (attention_plain.cu):
//   p = exp(s - lse)     delta = rowsum(dout out)     ds = p (dout v^T - delta) scale     dq = ds k
// A cap c multiplies ds by its slope, 1 - (s / c)^2, and p where it corrects dq.
//
// Rounding of lse and out leaves rows of p that do not sum to one and rows of ds that do not sum to zero. The second sum
// multiplies what all keys of a row share, which a large key bias makes the largest part of them: uncorrected, dq was 2.3
// to 4 times as far from float64 as torch's (biases of standard deviation 10 to 100, fp32). So the dq kernel corrects both
// by their sums over the keys:
//   total = rowsum(p)     error = rowsum(p (dout v^T - delta)) / total
//   dq = (ds k - error scale p k) / total     lse += log(total)     delta += error
// and attention_plain_dkdv.cu reads the corrected lse and delta. Of an out and lse that are not those of attention (own is
// false: a softmax with sinks), rows of p have other sums: total is 1, and error is 0. The gradient of lse, dlse, is what
// rows of ds sum to: error is less by it.
//
//   dqkv    [T, (H + 2 G) D], layout of qkv; this kernel writes the H query heads
//   dout    [T, H D], layout of out
//   delta, corrected lse   [H, T / chunks] fp32 each, workspace: chunks of tokens run one after another
// qkv, dqkv, out and dout are aligned to 16 bytes. Outputs are written, not accumulated into. Sums are fp32; dq is
// rounded once.
//
// Grid: delta uses one warp per (token, head). For dq, a block computes 64 queries of one query head (32 at D = 256) and
// iterates over the keys from the first one that its first row sees to its last row. Scores are recomputed: 4 products,
// bound by fp32 arithmetic. 95 KB of shared memory at D = 128, 105 KB at D = 256.

#include "attention.h"
#include "attention_tile.cuh"
#include "surogate/reduce.cuh"

namespace surogate {
namespace {

using namespace attention;

constexpr int streamed = 16;  // keys per tile of the loop over keys

template <int D>
constexpr int shared_bytes = (tile_floats<2 * owned<D> + 2 * streamed, D> + tile_floats<2 * owned<D>, streamed>) *
                             static_cast<int>(sizeof(float));

__global__ void __launch_bounds__(threads) delta_kernel(const float* dout, const float* out, float* delta, Sizes sizes) {
    using V = Vec<float>;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (index >= static_cast<int64_t>(sizes.tokens) * sizes.heads) {
        return;
    }
    float sum = 0.0f;
    for (int column = lane * V::size; column < sizes.head_dim; column += 32 * V::size) {
        float a[V::size], b[V::size];
        V::load(dout + index * sizes.head_dim + column).to_float(a);
        V::load(out + index * sizes.head_dim + column).to_float(b);
#pragma unroll
        for (int i = 0; i < V::size; ++i) {
            sum = fmaf(a[i], b[i], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        const int64_t token = index / sizes.heads, head = index % sizes.heads;
        delta[head * sizes.tokens + token] = sum;
    }
}

template <int D>
__global__ void __launch_bounds__(threads, 2) attention_dq_kernel(Backward<float> tensors, Sizes sizes) {
    extern __shared__ __align__(16) float shared[];
    float* q = shared;
    float* d = q + tile_floats<owned<D>, D>;
    float* k = d + tile_floats<owned<D>, D>;
    float* v = k + tile_floats<streamed, D>;
    float* probs = v + tile_floats<streamed, D>;
    float* ds = probs + tile_floats<owned<D>, streamed>;
    __shared__ int starts[owned<D>];

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int first = (gridDim.x - 1 - blockIdx.x) * owned<D>;  // blocks with the most keys first
    const int end = min(first + owned<D>, sizes.tokens);
    const int head = blockIdx.y, group = head / (sizes.heads / sizes.groups);
    const auto keys = qkv_head(tensors.qkv, sizes, sizes.heads + group);
    const auto values = qkv_head(tensors.qkv, sizes, sizes.heads + sizes.groups + group);

    if (threadIdx.x < owned<D>) {
        starts[threadIdx.x] = first_key(tensors.cu_seqlens, sizes, first + threadIdx.x);
    }
    load_tile<owned<D>, D>(q, qkv_head(tensors.qkv, sizes, head), first, end);
    load_tile<owned<D>, D>(d, out_head(tensors.dout, sizes, head), first, end);
    __syncthreads();

    float log_sum[rows<D>], row_delta[rows<D>], total[rows<D>] = {}, excess[rows<D>] = {};
    Accumulator<D> dq, mean_key;
    dq.clear();
    mean_key.clear();
#pragma unroll
    for (int i = 0; i < rows<D>; ++i) {
        const int row = first + ty + 16 * i;
        log_sum[i] = row < end ? tensors.lse[head * sizes.lse_row + row] : 0.0f;
        row_delta[i] = row < end ? tensors.delta[static_cast<int64_t>(head) * sizes.tokens + row] : 0.0f;
    }

    for (int key = starts[0]; key < end; key += streamed) {
        __syncthreads();
        load_tile<streamed, D>(k, keys, key, end);
        load_tile<streamed, D>(v, values, key, end);
        __syncthreads();

        float s[rows<D>][1], dp[rows<D>][1];
        multiply_rows<1, D>(q, k, s);
        multiply_rows<1, D>(d, v, dp);
        const int column = key + tx;
#pragma unroll
        for (int i = 0; i < rows<D>; ++i) {
            const int row = ty + 16 * i;
            const bool seen = starts[row] <= column && column <= first + row;
            float p, slope = 1.0f;
            if (sizes.softcap > 0) {
                const float t = tanh_of_score(s[i][0], sizes);
                p = seen ? expf(sizes.softcap * t - log_sum[i]) : 0.0f;
                slope -= t * t;
            } else {
                p = seen ? expf(s[i][0] * sizes.scale - log_sum[i]) : 0.0f;
            }
            const float centred = seen ? p * (dp[i][0] - row_delta[i]) : 0.0f;
            total[i] += p;
            excess[i] += centred;
            probs[row * (streamed + padding) + tx] = p * slope;
            ds[row * (streamed + padding) + tx] = centred * sizes.scale * slope;
        }
        __syncwarp();  // the same half of a warp writes and reads a row of probs and ds
        dq.template add_product<streamed>(ds, k);
        mean_key.template add_product<streamed>(probs, k);
    }

#pragma unroll
    for (int i = 0; i < rows<D>; ++i) {
        float sum = warp_reduce<16>(total[i], Sum{}), error = warp_reduce<16>(excess[i], Sum{}) / sum;
        if (!sizes.own) {
            sum = 1.0f, error = 0.0f;
        }
        const int row = first + ty + 16 * i;
        if (tensors.dlse && row < end) {
            error -= tensors.dlse[head * sizes.lse_row + row];
        }
        if (row < end && tx == 0) {
            const int64_t at = static_cast<int64_t>(head) * sizes.tokens + row;
            tensors.delta[at] = row_delta[i] + error;
            tensors.corrected_lse[at] = log_sum[i] + logf(sum);
        }
        dq.add_row(i, mean_key, -error * sizes.scale);
        dq.scale_row(i, 1.0f / sum);
    }
    dq.store(qkv_head(tensors.dqkv, sizes, head), first, end);
}

}  // namespace

void attention_plain_bwd(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens, const void* dlse,
                         void* dqkv, void* workspace, int64_t tokens, int64_t documents, int64_t heads,
                         int64_t kv_heads, int64_t head_dim, int64_t window, double scale, double softcap, bool own,
                         int64_t chunks, cudaStream_t stream) {
    constexpr auto op = "attention_plain_bwd";
    const auto tensors = backward_of<float>(dout, qkv, out, lse, cu_seqlens, dlse, dqkv, workspace);
    Sizes whole = checked_sizes(tokens, documents, heads, kv_heads, head_dim, window, scale, softcap, op);
    whole.own = own;
    in_chunks(tensors, whole, chunks, op, [&](const Backward<float>& chunk, const Sizes& sizes) {
        const int64_t pairs = static_cast<int64_t>(sizes.tokens) * sizes.heads;
        const int delta_blocks = to_int(ceil_div(pairs, threads / 32), op, "tokens * heads / 8");
        delta_kernel<<<delta_blocks, threads, 0, stream>>>(chunk.dout, chunk.out, chunk.delta, sizes);
        check_launch(op);
        dispatch(sizes, [&](auto d) {
            constexpr int D = decltype(d)::value;
            allow_shared_memory(attention_dq_kernel<D>, shared_bytes<D>, op);
            attention_dq_kernel<D><<<dim3(tiles<D>(sizes), sizes.heads), threads, shared_bytes<D>, stream>>>(chunk, sizes);
            check_launch(op);
        });
        attention_dkdv(chunk, sizes, op, stream);
    });
}

}  // namespace surogate
