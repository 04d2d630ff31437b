// Tiles of the plain attention kernels, which attention_plain.cu documents. A block owns a tile of 64 consecutive rows
// of [0, T], or of 32 if D is 256, and iterates over tiles of the rows that they need (the streamed tiles).
//
// Tiles are stored in shared memory as fp32 [rows, D + padding]. D is head_dim rounded up to a multiple of 32, or 256;
// columns beyond head_dim are zero. The 256 threads are arranged as 16 x 16: thread (ty, tx) has the rows ty + 16 i of the
// owned tile. The 16 threads with the same ty share these rows and form one half of a warp. Sums are fp32 in a fixed
// order.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "attention_rows.cuh"
#include "surogate/shared_memory.h"
#include "surogate/vec.cuh"

namespace surogate::attention {

constexpr int threads = 256;
template <int D>
constexpr int owned = D > 128 ? most_owned / 2 : most_owned;  // rows of the tile that a block owns
template <int D>
constexpr int rows = owned<D> / 16;  // owned rows per thread
constexpr int padding = 4;  // floats after each row in shared memory: 16-byte reads of 8 rows then use all banks

// Number of floats of a tile of `Rows` rows of `Width` elements in shared memory.
template <int Rows, int Width>
constexpr int tile_floats = Rows * (Width + padding);

// ------------------------------------------------------------------------------------------------------------- scores

// The score of a product of a query and a key is `product * scale`. With a cap it is softcap * t, and its derivative by
// the scaled product is 1 - t^2, where t is this function.
__device__ inline float tanh_of_score(float product, const Sizes& sizes) {
    return tanhf(product * sizes.scale / sizes.softcap);
}

// ------------------------------------------------------------------------------------------------------------- tiles

// Loads the rows first to first + Rows - 1 of a head into shared memory. Rows from `end` on and columns from
// head.columns to D are zero. Synchronizes the block before and after.
template <int Rows, int D>
__device__ void load_tile(float* tile, const Head<const float>& head, int first, int end) {
    using V = Vec<float>;
    constexpr int vectors = D / V::size;
    for (int i = threadIdx.x; i < Rows * vectors; i += threads) {
        const int row = i / vectors, column = i % vectors * V::size;
        float values[V::size] = {};
        if (first + row < end && column < head.columns) {
            V::load(head.data + (first + row) * head.stride + column).to_float(values);
        }
        V::from_float(values).store(tile + row * (D + padding) + column);
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
    __device__ void store(const Head<float>& head, int first, int end) const {
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
                        Vec<float, 2>::from_float(pair).store(head.data + row * head.stride + column);
                    }
                }
            }
        }
    }
};

// ----------------------------------------------------------------------------------------------------------- host code

// Number of blocks along the rows.
template <int D>
unsigned tiles(const Sizes& sizes) {
    return static_cast<unsigned>(ceil_div(sizes.tokens, owned<D>));
}

// Calls launch(integral constant D).
template <class Launch>
void dispatch(const Sizes& sizes, Launch launch) {
    switch ((sizes.head_dim + 31) / 32) {
        case 1:
            return launch(std::integral_constant<int, 32>{});
        case 2:
            return launch(std::integral_constant<int, 64>{});
        case 3:
            return launch(std::integral_constant<int, 96>{});
        case 4:
            return launch(std::integral_constant<int, 128>{});
        default:
            return launch(std::integral_constant<int, 256>{});
    }
}

// Computes dk and dv of attention_plain_bwd (attention_plain_dkdv.cu).
void attention_dkdv(const Backward<float>& tensors, const Sizes& sizes, const char* op, cudaStream_t stream);

}  // namespace surogate::attention
