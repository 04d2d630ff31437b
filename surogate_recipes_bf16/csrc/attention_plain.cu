// Attention in plain fp32 arithmetic, for every dtype and every SM80+: what fp32 training runs on, and the measure of
// the library's route. Right before fast.
//
// Causal attention inside each document, H query heads that share G key/value heads (query head h reads h / (H / G)):
//   s = q k^T / sqrt(D)     lse = log sum exp s     p = exp(s - lse)     out = p v
//   dv = p^T dout     ds = p (dout v^T - rowsum(dout out)) / sqrt(D)     dq = ds k     dk = ds^T q
//
//   qkv, dqkv    [T, (H + 2 G) D] fp32 or bf16; columns: H query heads, G key heads, G value heads
//   out, dout    [T, H D] of the same dtype
//   lse          [H, T] fp32, natural logarithm
//   cu_seqlens   [documents + 1] int32 on the device, ascending from 0 to T; a document may be empty
//   delta        [H, T] fp32, scratch of the backward
// Everything is written, nothing added to. D is a multiple of 8 up to 128; kernels are compiled for 32, 64, 96 and 128,
// and a D between pays for the next of them, its missing columns zeros. qkv, dqkv, out, dout: 16-byte alignment.
//
// Sums are fp32 and each output is rounded once. No atomics: the same bits from run to run. All queries of a group are
// added into dk and dv by one block, heads and rows in ascending order.
//
// Grid: a block owns 64 consecutive rows of [0, T] and a head, whatever documents the rows belong to, and streams over
// the rows that any of them needs: for queries the keys from the start of the first row's document up to the last row,
// for keys the queries from the first row up to the end of the last row's document. So the work is the causal triangle
// of every document rounded up to tiles, and the number of documents does not matter, empty ones included. Memory
// beside the tensors: none that grows with T^2.
//
// Bound by fp32 arithmetic (2 products forward; 7 backward, since scores are computed for dq and again for dk, dv), not
// by bytes. A tile of 64 rows and the streamed one lie in shared memory as fp32: 77 KB forward, 95 KB backward at
// D = 128, which SM86 and SM120 still have. 256 threads are 16 x 16: thread (ty, tx) has rows ty + 16 i of the owned
// tile; its 16 neighbours tx share these rows and sit in one half of a warp.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "attention.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr int owned = 64;             // rows of the tile that a block owns
constexpr int rows = owned / 16;      // of them, rows a thread
constexpr int streamed_forward = 32;  // rows of a tile that a block streams over
constexpr int streamed_backward = 16;
constexpr int padding = 4;  // floats behind each row in shared memory: 16-byte reads of 8 rows then hit all banks

struct Sizes {
    int tokens;
    int documents;
    int heads;
    int groups;
    int head_dim;
    float scale;
};

// The document of a token: the last one that starts at or before it. Empty ones before it start there too.
__device__ int document_of(const int* cu_seqlens, int documents, int token) {
    int low = 0, high = documents;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (cu_seqlens[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// First token of the token's document; above every token for a row that does not exist.
__device__ int document_start(const int* cu_seqlens, const Sizes& sizes, int token) {
    return token < sizes.tokens ? cu_seqlens[document_of(cu_seqlens, sizes.documents, token)] : INT_MAX;
}

// The token behind the last of the token's document; 0 for a row that does not exist.
__device__ int document_end(const int* cu_seqlens, const Sizes& sizes, int token) {
    if (token >= sizes.tokens) {
        return 0;
    }
    return min(cu_seqlens[document_of(cu_seqlens, sizes.documents, token) + 1], sizes.tokens);
}

// Rows first .. first + Rows - 1 of a matrix whose rows are `stride` apart into shared memory as fp32; zeros from row
// `end` and from column `columns` on, up to D. The block synchronises before and after.
template <int Rows, int D, class T>
__device__ void load_tile(float* tile, const T* matrix, int64_t stride, int columns, int first, int end) {
    using V = Vec<T>;
    constexpr int vectors = D / V::size;
    for (int i = threadIdx.x; i < Rows * vectors; i += threads) {
        const int row = i / vectors, column = i % vectors * V::size;
        float values[V::size] = {};
        if (first + row < end && column < columns) {
            V::load(matrix + (first + row) * stride + column).to_float(values);
        }
        float* target = tile + row * (D + padding) + column;
#pragma unroll
        for (int k = 0; k < V::size; k += 4) {
            *reinterpret_cast<float4*>(target + k) =
                make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
        }
    }
}

// products[i][j] = row (ty + 16 i) of a times row (tx + 16 j) of b.
template <int Columns, int D>
__device__ void multiply_rows(const float* a, const float* b, float (&products)[rows][Columns]) {
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
#pragma unroll
        for (int j = 0; j < Columns; ++j) {
            products[i][j] = 0.0f;
        }
    }
#pragma unroll 2
    for (int d = 0; d < D; d += 4) {
        float4 right[Columns];
#pragma unroll
        for (int j = 0; j < Columns; ++j) {
            right[j] = *reinterpret_cast<const float4*>(b + (tx + 16 * j) * (D + padding) + d);
        }
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const float4 left = *reinterpret_cast<const float4*>(a + (ty + 16 * i) * (D + padding) + d);
#pragma unroll
            for (int j = 0; j < Columns; ++j) {
                float& sum = products[i][j];
                sum = fmaf(left.x, right[j].x, sum);
                sum = fmaf(left.y, right[j].y, sum);
                sum = fmaf(left.z, right[j].z, sum);
                sum = fmaf(left.w, right[j].w, sum);
            }
        }
    }
}

// A thread's part of a [64, D] result: rows ty + 16 i, columns 2 tx + 32 c and the one behind.
template <int D>
struct Accumulator {
    static constexpr int pairs = D / 32;
    float2 sums[rows][pairs];

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
#pragma unroll
            for (int c = 0; c < pairs; ++c) {
                sums[i][c] = make_float2(0.0f, 0.0f);
            }
        }
    }

    __device__ void scale_row(int i, float factor) {
#pragma unroll
        for (int c = 0; c < pairs; ++c) {
            sums[i][c].x *= factor;
            sums[i][c].y *= factor;
        }
    }

    // += weights [64, Streamed] times values [Streamed, D], both in shared memory.
    template <int Streamed>
    __device__ void add_product(const float* weights, const float* values) {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll 1  // unrolled it wants more registers than two blocks on an SM leave
        for (int k = 0; k < Streamed; k += 4) {
            float weight[rows][4];
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                const float4 four =
                    *reinterpret_cast<const float4*>(weights + (ty + 16 * i) * (Streamed + padding) + k);
                weight[i][0] = four.x;
                weight[i][1] = four.y;
                weight[i][2] = four.z;
                weight[i][3] = four.w;
            }
#pragma unroll
            for (int m = 0; m < 4; ++m) {
#pragma unroll
                for (int c = 0; c < pairs; ++c) {
                    const float2 value =
                        *reinterpret_cast<const float2*>(values + (k + m) * (D + padding) + 2 * tx + 32 * c);
#pragma unroll
                    for (int i = 0; i < rows; ++i) {
                        sums[i][c].x = fmaf(weight[i][m], value.x, sums[i][c].x);
                        sums[i][c].y = fmaf(weight[i][m], value.y, sums[i][c].y);
                    }
                }
            }
        }
    }

    // Into rows first .. first + 63 of a matrix, as far as they lie below `end`, and its `columns` columns.
    template <class T>
    __device__ void store(T* matrix, int64_t stride, int columns, int first, int end) const {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const int row = first + ty + 16 * i;
            if (row < end) {
#pragma unroll
                for (int c = 0; c < pairs; ++c) {
                    const float pair[2] = {sums[i][c].x, sums[i][c].y};
                    const int column = 2 * tx + 32 * c;
                    if (column < columns) {
                        Vec<T, 2>::from_float(pair).store(matrix + row * stride + column);
                    }
                }
            }
        }
    }
};

template <int D>
constexpr int forward_bytes = ((owned + 2 * streamed_forward) * (D + padding) + owned * (streamed_forward + padding)) *
                              static_cast<int>(sizeof(float));

template <int D>
constexpr int backward_bytes = ((2 * owned + 2 * streamed_backward) * (D + padding) +
                                2 * owned * (streamed_backward + padding)) *
                               static_cast<int>(sizeof(float));

// Block (tile of queries, query head). Softmax over the key tiles as they come: maximum and sum of a row so far, and
// what was summed before is scaled when the maximum rises.
template <class T, int D>
__global__ void __launch_bounds__(threads, 2)
    attention_kernel(const T* qkv, const int* cu_seqlens, T* out, float* lse, Sizes sizes) {
    extern __shared__ __align__(16) float shared[];
    float* q = shared;
    float* k = q + owned * (D + padding);
    float* v = k + streamed_forward * (D + padding);
    float* p = v + streamed_forward * (D + padding);
    __shared__ int starts[owned];

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int first = (gridDim.x - 1 - blockIdx.x) * owned;  // the longest rows first
    const int end = min(first + owned, sizes.tokens);
    const int head = blockIdx.y, group = head / (sizes.heads / sizes.groups);
    const int size = sizes.head_dim;
    const int64_t stride = static_cast<int64_t>(sizes.heads + 2 * sizes.groups) * size;
    const T* keys = qkv + static_cast<int64_t>(sizes.heads + group) * size;
    const T* values = keys + static_cast<int64_t>(sizes.groups) * size;

    if (threadIdx.x < owned) {
        starts[threadIdx.x] = document_start(cu_seqlens, sizes, first + threadIdx.x);
    }
    load_tile<owned, D>(q, qkv + static_cast<int64_t>(head) * size, stride, size, first, end);
    __syncthreads();

    float highest[rows], total[rows];
    Accumulator<D> sums;
    sums.clear();
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        highest[i] = -INFINITY;
        total[i] = 0.0f;
    }

    for (int key = starts[0]; key < end; key += streamed_forward) {
        __syncthreads();
        load_tile<streamed_forward, D>(k, keys, stride, size, key, end);
        load_tile<streamed_forward, D>(v, values, stride, size, key, end);
        __syncthreads();

        constexpr int columns = streamed_forward / 16;
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
                p[row * (streamed_forward + padding) + tx + 16 * j] = weight;
                sum += weight;
            }
            highest[i] = raised;
            total[i] = total[i] * factor + warp_sum<16>(sum);
            sums.scale_row(i, factor);
        }
        __syncwarp();  // a row of p is written and read by the same half of a warp
        sums.template add_product<streamed_forward>(p, v);
    }

#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int row = first + ty + 16 * i;
        sums.scale_row(i, 1.0f / total[i]);
        if (tx == 0 && row < end) {
            lse[static_cast<int64_t>(head) * sizes.tokens + row] = highest[i] + logf(total[i]);
        }
    }
    sums.store(out + static_cast<int64_t>(head) * size, static_cast<int64_t>(sizes.heads) * size, size, first, end);
}

// delta = rowsum(dout out). A warp for each (token, head).
template <class T>
__global__ void __launch_bounds__(threads) delta_kernel(const T* dout, const T* out, float* delta, Sizes sizes) {
    using V = Vec<T>;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (index >= static_cast<int64_t>(sizes.tokens) * sizes.heads) {
        return;
    }
    float sum = 0.0f;
    if (lane * V::size < sizes.head_dim) {
        float a[V::size], b[V::size];
        V::load(dout + index * sizes.head_dim + lane * V::size).to_float(a);
        V::load(out + index * sizes.head_dim + lane * V::size).to_float(b);
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

// Block (tile of queries, query head): dq.
template <class T, int D>
__global__ void __launch_bounds__(threads, 2)
    attention_dq_kernel(const T* dout, const T* qkv, const float* lse, const float* delta, const int* cu_seqlens,
                        T* dqkv, Sizes sizes) {
    extern __shared__ __align__(16) float shared[];
    float* q = shared;
    float* d = q + owned * (D + padding);
    float* k = d + owned * (D + padding);
    float* v = k + streamed_backward * (D + padding);
    float* ds = v + streamed_backward * (D + padding);
    __shared__ int starts[owned];

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int first = (gridDim.x - 1 - blockIdx.x) * owned;
    const int end = min(first + owned, sizes.tokens);
    const int head = blockIdx.y, group = head / (sizes.heads / sizes.groups);
    const int size = sizes.head_dim;
    const int64_t stride = static_cast<int64_t>(sizes.heads + 2 * sizes.groups) * size;
    const T* keys = qkv + static_cast<int64_t>(sizes.heads + group) * size;
    const T* values = keys + static_cast<int64_t>(sizes.groups) * size;

    if (threadIdx.x < owned) {
        starts[threadIdx.x] = document_start(cu_seqlens, sizes, first + threadIdx.x);
    }
    load_tile<owned, D>(q, qkv + static_cast<int64_t>(head) * size, stride, size, first, end);
    const int64_t out_stride = static_cast<int64_t>(sizes.heads) * size;
    load_tile<owned, D>(d, dout + static_cast<int64_t>(head) * size, out_stride, size, first, end);
    __syncthreads();

    float log_sum[rows], row_delta[rows];
    Accumulator<D> dq;
    dq.clear();
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        const int row = first + ty + 16 * i;
        const int64_t at = static_cast<int64_t>(head) * sizes.tokens + row;
        log_sum[i] = row < end ? lse[at] : 0.0f;
        row_delta[i] = row < end ? delta[at] : 0.0f;
    }

    for (int key = starts[0]; key < end; key += streamed_backward) {
        __syncthreads();
        load_tile<streamed_backward, D>(k, keys, stride, size, key, end);
        load_tile<streamed_backward, D>(v, values, stride, size, key, end);
        __syncthreads();

        float s[rows][1], dp[rows][1];
        multiply_rows<1, D>(q, k, s);
        multiply_rows<1, D>(d, v, dp);
        const int column = key + tx;
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const int row = ty + 16 * i;
            const bool seen = starts[row] <= column && column <= first + row;
            const float p = seen ? expf(s[i][0] * sizes.scale - log_sum[i]) : 0.0f;
            ds[row * (streamed_backward + padding) + tx] = seen ? p * (dp[i][0] - row_delta[i]) * sizes.scale : 0.0f;
        }
        __syncwarp();
        dq.template add_product<streamed_backward>(ds, k);
    }
    dq.store(dqkv + static_cast<int64_t>(head) * size, stride, size, first, end);
}

// Block (tile of keys, key/value head): dk and dv, over the query heads of the group.
template <class T, int D>
__global__ void __launch_bounds__(threads, 2)
    attention_dkdv_kernel(const T* dout, const T* qkv, const float* lse, const float* delta, const int* cu_seqlens,
                          T* dqkv, Sizes sizes) {
    extern __shared__ __align__(16) float shared[];
    float* k = shared;
    float* v = k + owned * (D + padding);
    float* q = v + owned * (D + padding);
    float* d = q + streamed_backward * (D + padding);
    float* p = d + streamed_backward * (D + padding);
    float* ds = p + owned * (streamed_backward + padding);
    __shared__ int ends[owned];

    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    const int first = blockIdx.x * owned;  // the first keys have the most queries
    const int end = min(first + owned, sizes.tokens);
    const int group = blockIdx.y, share = sizes.heads / sizes.groups;
    const int size = sizes.head_dim;
    const int64_t stride = static_cast<int64_t>(sizes.heads + 2 * sizes.groups) * size;
    const int64_t out_stride = static_cast<int64_t>(sizes.heads) * size;
    const int64_t key_column = static_cast<int64_t>(sizes.heads + group) * size;
    const int64_t value_column = key_column + static_cast<int64_t>(sizes.groups) * size;

    if (threadIdx.x < owned) {
        ends[threadIdx.x] = document_end(cu_seqlens, sizes, first + threadIdx.x);
    }
    load_tile<owned, D>(k, qkv + key_column, stride, size, first, end);
    load_tile<owned, D>(v, qkv + value_column, stride, size, first, end);
    __syncthreads();

    const int last_query = ends[end - 1 - first];
    Accumulator<D> dk, dv;
    dk.clear();
    dv.clear();

    for (int head = group * share; head < (group + 1) * share; ++head) {
        const T* queries = qkv + static_cast<int64_t>(head) * size;
        const T* gradients = dout + static_cast<int64_t>(head) * size;
        const int64_t statistics = static_cast<int64_t>(head) * sizes.tokens;
        for (int query = first; query < last_query; query += streamed_backward) {
            __syncthreads();
            load_tile<streamed_backward, D>(q, queries, stride, size, query, last_query);
            load_tile<streamed_backward, D>(d, gradients, out_stride, size, query, last_query);
            __syncthreads();

            float s[rows][1], dp[rows][1];
            multiply_rows<1, D>(k, q, s);
            multiply_rows<1, D>(v, d, dp);
            const int column = query + tx;
            const bool exists = column < last_query;
            const float log_sum = exists ? lse[statistics + column] : 0.0f;
            const float column_delta = exists ? delta[statistics + column] : 0.0f;
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                const int row = ty + 16 * i;
                const bool seen = first + row <= column && column < ends[row];
                const float weight = seen ? expf(s[i][0] * sizes.scale - log_sum) : 0.0f;
                p[row * (streamed_backward + padding) + tx] = weight;
                ds[row * (streamed_backward + padding) + tx] =
                    seen ? weight * (dp[i][0] - column_delta) * sizes.scale : 0.0f;
            }
            __syncwarp();
            dv.template add_product<streamed_backward>(p, d);
            dk.template add_product<streamed_backward>(ds, q);
        }
    }
    dk.store(dqkv + key_column, stride, size, first, end);
    dv.store(dqkv + value_column, stride, size, first, end);
}

// More shared memory than a launch gets unasked. Not a stream operation: allowed while a graph is captured.
template <class Kernel>
void allow_shared(Kernel kernel, int bytes, const char* op) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
}

template <class T, int D>
void launch_forward(const void* qkv, const void* cu_seqlens, void* out, void* lse, const Sizes& sizes, dim3 grid,
                    cudaStream_t stream) {
    allow_shared(attention_kernel<T, D>, forward_bytes<D>, "attention_plain");
    attention_kernel<T, D><<<grid, threads, forward_bytes<D>, stream>>>(
        static_cast<const T*>(qkv), static_cast<const int*>(cu_seqlens), static_cast<T*>(out),
        static_cast<float*>(lse), sizes);
    check_launch("attention_plain");
}

template <class T, int D>
void launch_backward(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens,
                     void* dqkv, void* delta, const Sizes& sizes, int tiles, cudaStream_t stream) {
    const auto* d = static_cast<const T*>(dout);
    const auto* x = static_cast<const T*>(qkv);
    const auto* log_sums = static_cast<const float*>(lse);
    const auto* documents = static_cast<const int*>(cu_seqlens);
    auto* dx = static_cast<T*>(dqkv);
    auto* row_sums = static_cast<float*>(delta);
    const int64_t pairs = static_cast<int64_t>(sizes.tokens) * sizes.heads;
    const int delta_blocks = to_int(ceil_div(pairs, threads / 32), "attention_plain_bwd", "tokens * heads / 8");

    delta_kernel<T><<<delta_blocks, threads, 0, stream>>>(d, static_cast<const T*>(out), row_sums, sizes);
    check_launch("attention_plain_bwd");
    allow_shared(attention_dq_kernel<T, D>, backward_bytes<D>, "attention_plain_bwd");
    attention_dq_kernel<T, D><<<dim3(tiles, sizes.heads), threads, backward_bytes<D>, stream>>>(
        d, x, log_sums, row_sums, documents, dx, sizes);
    check_launch("attention_plain_bwd");
    allow_shared(attention_dkdv_kernel<T, D>, backward_bytes<D>, "attention_plain_bwd");
    attention_dkdv_kernel<T, D><<<dim3(tiles, sizes.groups), threads, backward_bytes<D>, stream>>>(
        d, x, log_sums, row_sums, documents, dx, sizes);
    check_launch("attention_plain_bwd");
}

Sizes checked_sizes(int64_t tokens, int64_t documents, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    const char* op) {
    check_positive(tokens, op, "tokens");
    check_positive(documents, op, "documents");
    check_positive(heads, op, "heads");
    check_positive(kv_heads, op, "kv_heads");
    SUROGATE_REQUIRE(heads % kv_heads == 0, op,
                     std::to_string(heads) + " heads cannot share " + std::to_string(kv_heads) + " kv_heads evenly");
    SUROGATE_REQUIRE(heads <= 65535, op, "heads must be at most 65535, got " + std::to_string(heads));
    // A tile may reach beyond the last token, and its row numbers must not wrap.
    SUROGATE_REQUIRE(tokens <= INT_MAX - owned, op, "tokens must fit in 31 bits, got " + std::to_string(tokens));
    SUROGATE_REQUIRE(head_dim > 0 && head_dim % 8 == 0 && head_dim <= 128, op,
                     "head_dim must be a multiple of 8 up to 128, got " + std::to_string(head_dim));
    return {static_cast<int>(tokens),
            to_int(documents, op, "documents"),
            static_cast<int>(heads),
            static_cast<int>(kv_heads),
            static_cast<int>(head_dim),
            static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)))};
}

// launch(integral constant D, an object of the element type); head_dim has been checked.
template <class Launch>
void dispatch(int64_t head_dim, int dtype, const char* op, Launch launch) {
    const auto by_head_dim = [&](auto element) {
        switch ((head_dim + 31) / 32) {
            case 1:
                return launch(std::integral_constant<int, 32>{}, element);
            case 2:
                return launch(std::integral_constant<int, 64>{}, element);
            case 3:
                return launch(std::integral_constant<int, 96>{}, element);
            default:
                return launch(std::integral_constant<int, 128>{}, element);
        }
    };
    switch (dtype) {
        case FP32:
            return by_head_dim(float{});
        case BF16:
            return by_head_dim(__nv_bfloat16{});
        default:
            SUROGATE_REQUIRE(false, op, std::string("dtype must be fp32 or bf16, got ") + name_of(dtype));
    }
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
    const dim3 grid(static_cast<unsigned>(ceil_div(tokens, owned)), static_cast<unsigned>(heads));
    dispatch(head_dim, dtype, op, [&](auto d, auto element) {
        launch_forward<decltype(element), decltype(d)::value>(qkv, cu_seqlens, out, lse, sizes, grid, stream);
    });
}

int64_t attention_plain_bwd_workspace(int64_t tokens, int64_t heads) {
    return tokens * heads * static_cast<int64_t>(sizeof(float));
}

void attention_plain_bwd(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens,
                         void* dqkv, void* workspace, int64_t tokens, int64_t documents, int64_t heads,
                         int64_t kv_heads, int64_t head_dim, int dtype, cudaStream_t stream) {
    constexpr auto op = "attention_plain_bwd";
    check_pointer(dout, op, "dout", 16);
    check_pointer(qkv, op, "qkv", 16);
    check_pointer(out, op, "out", 16);
    check_pointer(lse, op, "lse", 4);
    check_pointer(cu_seqlens, op, "cu_seqlens", 4);
    check_pointer(dqkv, op, "dqkv", 16);
    check_pointer(workspace, op, "workspace", 4);
    const Sizes sizes = checked_sizes(tokens, documents, heads, kv_heads, head_dim, op);
    const int tiles = static_cast<int>(ceil_div(tokens, owned));
    dispatch(head_dim, dtype, op, [&](auto d, auto element) {
        launch_backward<decltype(element), decltype(d)::value>(dout, qkv, out, lse, cu_seqlens, dqkv, workspace, sizes,
                                                               tiles, stream);
    });
}

}  // namespace surogate
