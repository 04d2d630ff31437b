// Tiles of the plain attention kernels, which attention_plain.cu documents. A block owns a tile of 64 consecutive rows
// of [0, T], or of 32 if D is 256, and iterates over tiles of the rows that they need (the streamed tiles).
//
// Tiles are stored in shared memory as fp32 [rows, D + padding]. D is head_dim rounded up to a multiple of 32, or 256;
// columns beyond head_dim are zero. The 256 threads are arranged as 16 x 16: thread (ty, tx) has the rows ty + 16 i of the
// owned tile. The 16 threads with the same ty share these rows and form one half of a warp. Sums are fp32 in a fixed
// order.
//
// A tile may contain rows of several documents. A block iterates over all rows that any of its rows needs and masks
// those that a row does not attend to. So the work is the causal triangle of each document, or the band of its window,
// rounded up to tiles; the number of documents, empty ones included, does not matter.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <string>
#include <type_traits>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/shared_memory.h"
#include "surogate/vec.cuh"

namespace surogate::attention {

constexpr int threads = 256;
constexpr int most_owned = 64;
template <int D>
constexpr int owned = D > 128 ? most_owned / 2 : most_owned;  // rows of the tile that a block owns
template <int D>
constexpr int rows = owned<D> / 16;  // owned rows per thread
constexpr int padding = 4;  // floats after each row in shared memory: 16-byte reads of 8 rows then use all banks

// Tensors begin at token `first` of the micro-batch, but for cu_seqlens and the rows of lse, which have all its tokens.
struct Sizes {
    int tokens;
    int documents;
    int heads;
    int groups;
    int head_dim;
    float scale;
    float softcap;  // 0: none
    int window;     // the largest number of keys that a query sees
    int first;
    int64_t lse_row;  // tokens from a head of lse to the next one
};

// Number of floats of a tile of `Rows` rows of `Width` elements in shared memory.
template <int Rows, int Width>
constexpr int tile_floats = Rows * (Width + padding);

// --------------------------------------------------------------------------------------------------------- documents

// Returns the document of a token: the last one that starts at or before it. Empty documents may start there too.
__device__ inline int document_of(const int* cu_seqlens, int documents, int token) {
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

// Returns the first key that a query sees: that of its document or of its window; INT_MAX for a row beyond the last
// token.
__device__ inline int first_key(const int* cu_seqlens, const Sizes& sizes, int query) {
    if (query >= sizes.tokens) {
        return INT_MAX;
    }
    const int start = cu_seqlens[document_of(cu_seqlens, sizes.documents, sizes.first + query)] - sizes.first;
    return max(start, query - sizes.window + 1);
}

// Returns the end (exclusive) of the queries that see a key, or 0 for a row beyond the last token.
__device__ inline int queries_end(const int* cu_seqlens, const Sizes& sizes, int key) {
    if (key >= sizes.tokens) {
        return 0;
    }
    const int document = document_of(cu_seqlens, sizes.documents, sizes.first + key);
    const int end = min(cu_seqlens[document + 1] - sizes.first, sizes.tokens);
    return end - key < sizes.window ? end : key + sizes.window;
}

// ------------------------------------------------------------------------------------------------------------- scores

// The score of a product of a query and a key is `product * scale`. With a cap it is softcap * t, and its derivative by
// the scaled product is 1 - t^2, where t is this function.
__device__ inline float tanh_of_score(float product, const Sizes& sizes) {
    return tanhf(product * sizes.scale / sizes.softcap);
}

// ------------------------------------------------------------------------------------------------------------- tiles

// The columns of one head in a row-major tensor. Row t begins at data + t * stride.
template <class T>
struct Head {
    T* data;
    int64_t stride;
    int columns;
};

// Returns a head of qkv or dqkv [T, (H + 2 G) D]. Query head h has index h, key head g index H + g, value head g index
// H + G + g.
template <class T>
__device__ Head<T> qkv_head(T* qkv, const Sizes& sizes, int index) {
    return {qkv + static_cast<int64_t>(index) * sizes.head_dim,
            static_cast<int64_t>(sizes.heads + 2 * sizes.groups) * sizes.head_dim, sizes.head_dim};
}

// Returns a head of out or dout [T, H D].
template <class T>
__device__ Head<T> out_head(T* out, const Sizes& sizes, int head) {
    return {out + static_cast<int64_t>(head) * sizes.head_dim, static_cast<int64_t>(sizes.heads) * sizes.head_dim,
            sizes.head_dim};
}

// Loads the rows first to first + Rows - 1 of a head into shared memory as fp32. Rows from `end` on and columns from
// head.columns to D are zero. Synchronizes the block before and after.
template <int Rows, int D, class T>
__device__ void load_tile(float* tile, const Head<const T>& head, int first, int end) {
    using V = Vec<T>;
    constexpr int vectors = D / V::size;
    for (int i = threadIdx.x; i < Rows * vectors; i += threads) {
        const int row = i / vectors, column = i % vectors * V::size;
        float values[V::size] = {};
        if (first + row < end && column < head.columns) {
            V::load(head.data + (first + row) * head.stride + column).to_float(values);
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
__device__ void multiply_rows(const float* a, const float* b, float (&products)[rows<D>][Columns]) {
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < rows<D>; ++i) {
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
        for (int i = 0; i < rows<D>; ++i) {
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

// A thread's part of a [owned, D] result: rows ty + 16 i, columns 2 tx + 32 c and 2 tx + 32 c + 1.
template <int D>
struct Accumulator {
    static constexpr int rows = attention::rows<D>, pairs = D / 32;
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

    // row i += factor times row i of `other`
    __device__ void add_row(int i, const Accumulator& other, float factor) {
#pragma unroll
        for (int c = 0; c < pairs; ++c) {
            sums[i][c].x = fmaf(factor, other.sums[i][c].x, sums[i][c].x);
            sums[i][c].y = fmaf(factor, other.sums[i][c].y, sums[i][c].y);
        }
    }

    // += weights [owned, Streamed] times values [Streamed, D], both in shared memory.
    template <int Streamed>
    __device__ void add_product(const float* weights, const float* values) {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll 1  // unrolling needs more registers than are available with two blocks per SM
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

    // Stores the rows of a head from `first` on that are below `end`.
    template <class T>
    __device__ void store(const Head<T>& head, int first, int end) const {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            const int row = first + ty + 16 * i;
            if (row < end) {
#pragma unroll
                for (int c = 0; c < pairs; ++c) {
                    const float pair[2] = {sums[i][c].x, sums[i][c].y};
                    const int column = 2 * tx + 32 * c;
                    if (column < head.columns) {
                        Vec<T, 2>::from_float(pair).store(head.data + row * head.stride + column);
                    }
                }
            }
        }
    }
};

// -------------------------------------------------------------------------------------------------------- host code

inline Sizes checked_sizes(int64_t tokens, int64_t documents, int64_t heads, int64_t kv_heads, int64_t head_dim,
                           int64_t window, double scale, double softcap, const char* op) {
    check_positive(tokens, op, "tokens");
    check_positive(documents, op, "documents");
    check_positive(heads, op, "heads");
    check_positive(kv_heads, op, "kv_heads");
    SUROGATE_REQUIRE(heads % kv_heads == 0, op,
                     std::to_string(heads) + " heads cannot share " + std::to_string(kv_heads) + " kv_heads evenly");
    SUROGATE_REQUIRE(heads <= 65535, op, "heads must be at most 65535, got " + std::to_string(heads));
    // The last tile may extend beyond the last token; its row indices must not overflow.
    SUROGATE_REQUIRE(tokens <= INT_MAX - most_owned, op, "tokens must fit in 31 bits, got " + std::to_string(tokens));
    SUROGATE_REQUIRE(head_dim > 0 && head_dim % 8 == 0 && head_dim <= 256, op,
                     "head_dim must be a multiple of 8 up to 256, got " + std::to_string(head_dim));
    SUROGATE_REQUIRE(window >= 0, op, "window must not be negative, got " + std::to_string(window));
    SUROGATE_REQUIRE(scale > 0, op, "scale must be positive, got " + std::to_string(scale));
    SUROGATE_REQUIRE(softcap >= 0, op, "softcap must not be negative, got " + std::to_string(softcap));
    const bool whole = window == 0 || window > tokens;
    return {static_cast<int>(tokens),
            to_int(documents, op, "documents"),
            static_cast<int>(heads),
            static_cast<int>(kv_heads),
            static_cast<int>(head_dim),
            static_cast<float>(scale),
            static_cast<float>(softcap),
            static_cast<int>(whole ? tokens : window),
            0,
            tokens};
}

// Number of blocks along the rows.
template <int D>
unsigned tiles(const Sizes& sizes) {
    return static_cast<unsigned>(ceil_div(sizes.tokens, owned<D>));
}

// Calls launch(integral constant D, value of the element type).
template <class Launch>
void dispatch(const Sizes& sizes, int dtype, const char* op, Launch launch) {
    const auto by_head_dim = [&](auto element) {
        switch ((sizes.head_dim + 31) / 32) {
            case 1:
                return launch(std::integral_constant<int, 32>{}, element);
            case 2:
                return launch(std::integral_constant<int, 64>{}, element);
            case 3:
                return launch(std::integral_constant<int, 96>{}, element);
            case 4:
                return launch(std::integral_constant<int, 128>{}, element);
            default:
                return launch(std::integral_constant<int, 256>{}, element);
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

// Computes dk and dv of attention_plain_bwd, which has checked the arguments (attention_plain_dkdv.cu).
void attention_dkdv(const void* dout, const void* qkv, const void* lse, const void* delta, const void* cu_seqlens,
                    void* dqkv, const Sizes& sizes, int dtype, const char* op, cudaStream_t stream);

}  // namespace surogate::attention
