// Attention in plain fp32 arithmetic, for every dtype and every SM80+: what fp32 training runs on, and the measure of
// the library's route. Right before fast. Here the forward; the backward is in attention_plain_dq.cu and
// attention_plain_dkdv.cu, what the three share in attention_tile.cuh.
//
// Causal attention inside each document, H query heads that share G key/value heads (query head h reads h / (H / G)):
//   s = q k^T / sqrt(D)     lse = log sum exp s     p = exp(s - lse)     out = p v
//
//   qkv          [T, (H + 2 G) D] fp32 or bf16; columns: H query heads, G key heads, G value heads
//   out          [T, H D] of the same dtype
//   lse          [H, T] fp32, natural logarithm
//   cu_seqlens   [documents + 1] int32 on the device, ascending from 0 to T; a document may be empty
// Everything is written, nothing added to. D is a multiple of 8 up to 128; kernels are compiled for 32, 64, 96 and 128,
// and a D between pays for the next of them. qkv, out: 16-byte alignment. Sums are fp32 and each output is rounded
// once. No atomics: the same bits from run to run.
//
// Grid: a block owns 64 queries of one query head and streams over the keys from the start of the first row's document
// up to the last row. Memory beside the tensors: none that grows with T^2. Bound by fp32 arithmetic (2 products), not
// by bytes. 77 KB of shared memory at D = 128 (95 KB in the backward), which SM86 and SM120 still have.

#include "attention.h"
#include "attention_tile.cuh"
#include "surogate/reduce.cuh"

namespace surogate {
namespace {

using namespace attention;

constexpr int streamed = 32;  // keys of a tile that a block streams over

template <int D>
constexpr int shared_bytes = (tile_floats<owned + 2 * streamed, D> + tile_floats<owned, streamed>) *
                             static_cast<int>(sizeof(float));

// Softmax over the key tiles as they come: maximum and sum of a row so far, and what was summed before is scaled when
// the maximum rises.
template <class T, int D>
__global__ void __launch_bounds__(threads, 2)
    attention_kernel(const T* qkv, const int* cu_seqlens, T* out, float* lse, Sizes sizes) {
    extern __shared__ __align__(16) float shared[];
    float* q = shared;
    float* k = q + tile_floats<owned, D>;
    float* v = k + tile_floats<streamed, D>;
    float* p = v + tile_floats<streamed, D>;
    __shared__ int starts[owned];

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int first = (gridDim.x - 1 - blockIdx.x) * owned;  // the longest rows first
    const int end = min(first + owned, sizes.tokens);
    const int head = blockIdx.y, group = head / (sizes.heads / sizes.groups);
    const auto keys = qkv_head(qkv, sizes, sizes.heads + group);
    const auto values = qkv_head(qkv, sizes, sizes.heads + sizes.groups + group);

    if (threadIdx.x < owned) {
        starts[threadIdx.x] = document_start(cu_seqlens, sizes, first + threadIdx.x);
    }
    load_tile<owned, D>(q, qkv_head(qkv, sizes, head), first, end);
    __syncthreads();

    float highest[rows], total[rows];
    Accumulator<D> sums;
    sums.clear();
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        highest[i] = -INFINITY;
        total[i] = 0.0f;
    }

    for (int key = starts[0]; key < end; key += streamed) {
        __syncthreads();
        load_tile<streamed, D>(k, keys, key, end);
        load_tile<streamed, D>(v, values, key, end);
        __syncthreads();

        constexpr int columns = streamed / 16;
        float s[rows][columns];
        multiply_rows<columns, D>(q, k, s);
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const int row = ty + 16 * i;
            float largest = -INFINITY;
#pragma unroll
            for (int j = 0; j < columns; ++j) {
                const int column = key + tx + 16 * j;
                const bool seen = starts[row] <= column && column <= first + row;
                s[i][j] = seen ? s[i][j] * sizes.scale : -INFINITY;
                largest = Max{}(largest, s[i][j]);
            }
            const float raised = Max{}(highest[i], warp_max<16>(largest));
            // A row that has seen no key yet (its document starts further on) has nothing to scale.
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
        __syncwarp();  // a row of p is written and read by the same half of a warp
        sums.template add_product<streamed>(p, v);
    }

#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int row = first + ty + 16 * i;
        sums.scale_row(i, 1.0f / total[i]);
        if (tx == 0 && row < end) {
            lse[static_cast<int64_t>(head) * sizes.tokens + row] = highest[i] + logf(total[i]);
        }
    }
    sums.store(out_head(out, sizes, head), first, end);
}

template <class T, int D>
void launch(const void* qkv, const void* cu_seqlens, void* out, void* lse, const Sizes& sizes, cudaStream_t stream) {
    allow_shared(attention_kernel<T, D>, shared_bytes<D>, "attention_plain");
    attention_kernel<T, D><<<dim3(tiles(sizes), sizes.heads), threads, shared_bytes<D>, stream>>>(
        static_cast<const T*>(qkv), static_cast<const int*>(cu_seqlens), static_cast<T*>(out),
        static_cast<float*>(lse), sizes);
    check_launch("attention_plain");
}

}  // namespace

void attention_plain(const void* qkv, const void* cu_seqlens, void* out, void* lse, int64_t tokens, int64_t documents,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int dtype, cudaStream_t stream) {
    constexpr auto op = "attention_plain";
    check_pointer(qkv, op, "qkv", 16);
    check_pointer(cu_seqlens, op, "cu_seqlens", 4);
    check_pointer(out, op, "out", 16);
    check_pointer(lse, op, "lse", 4);
    const Sizes sizes = checked_sizes(tokens, documents, heads, kv_heads, head_dim, op);
    dispatch(sizes, dtype, op, [&](auto d, auto element) {
        launch<decltype(element), decltype(d)::value>(qkv, cu_seqlens, out, lse, sizes, stream);
    });
}

}  // namespace surogate
