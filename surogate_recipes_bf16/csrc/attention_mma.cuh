// Tiles and products of the attention kernels for tensor cores, which attention_mma.cu documents.
//
// Tiles are stored in shared memory as bf16 [rows, D]. D is head_dim rounded up to 64, 96, 128 or 256; columns beyond head_dim
// are zero. The chunks of 16 bytes of a row are permuted by an exclusive or with bits of the row, so that the eight rows
// that ldmatrix reads at once are in different banks.
//
// A warp has 16 rows of the owned tile, and all rows of a streamed tile as columns of its scores. Its lane l has the rows
// l / 4 and l / 4 + 8, and the columns 2 (l % 4) + 8 n and the next one (multiply_add of mma.cuh): sums[n][0] and [1] are of
// the first row, [2] and [3] of the second one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "attention_rows.cuh"
#include "surogate/dtype.h"
#include "surogate/mma.cuh"
#include "surogate/reduce.cuh"
#include "surogate/shared_memory.h"
#include "surogate/vec.cuh"

namespace surogate::attention::mma {

using T = __nv_bfloat16;

constexpr int chunk = 8;         // elements in 16 bytes
constexpr int rows_of_warp = 16;

// --------------------------------------------------------------------------------------------------------------- tiles

// Returns what the number of a chunk is combined with by exclusive or. Rows of 96 elements begin in every other half of
// the banks, so two bits are left to permute.
template <int D>
__device__ __forceinline__ int permutation(int row) {
    return D % 64 == 0 ? row % 8 : row / 2 % 4;
}

// Begins to copy the rows first to first + Rows - 1 of a head. Rows from `end` on and columns from head.columns on become
// zero.
template <int Rows, int D, int Threads>
__device__ __forceinline__ void copy_tile(T* tile, const Head<const T>& head, int first, int end) {
    constexpr int of_row = D / chunk;
#pragma unroll
    for (int i = 0; i < Rows * of_row / Threads; ++i) {
        const int index = static_cast<int>(threadIdx.x) + i * Threads;
        const int row = index / of_row, column = index % of_row;
        const bool exists = first + row < end && column * chunk < head.columns;
        const T* source = exists ? head.data + (first + row) * head.stride + column * chunk : head.data;
        copy_async(tile + row * D + (column ^ permutation<D>(row)) * chunk, source, exists);
    }
}

// The address that a lane gives to ldmatrix, of a row and of one of two adjacent chunks.
template <int D>
struct Lane {
    int row, mixed;

    // 16 rows, two chunks: what is multiplied from the left, or from the right with its rows as terms
    static __device__ __forceinline__ Lane of_rows() {
        const int lane = threadIdx.x % 32;
        return {lane % 16, lane / 16 ^ permutation<D>(lane % 8)};
    }
    // the same matrices in the order of what is multiplied from the right with its columns as terms
    static __device__ __forceinline__ Lane of_columns() {
        const int lane = threadIdx.x % 32;
        return {lane / 16 * 8 + lane % 8, lane / 8 % 2 ^ permutation<D>(lane % 8)};
    }
    // `first` is a multiple of 16 and `pair` one of 2.
    __device__ __forceinline__ const T* at(const T* tile, int first, int pair) const {
        return tile + (first + row) * D + (pair ^ mixed) * chunk;
    }
};

// ------------------------------------------------------------------------------------------------------------- products

// products [16,Columns] = 16 rows of a tile times the rows of another one.
template <int D, int Columns>
__device__ __forceinline__ void multiply_rows(const T* left, const T* right, float (&products)[Columns / 8][4]) {
    const auto of_left = Lane<D>::of_rows(), of_right = Lane<D>::of_columns();
#pragma unroll
    for (int n = 0; n < Columns / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            products[n][e] = 0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        uint32_t a[4];
        load_matrices<false>(a, of_left.at(left, 0, 2 * k));
#pragma unroll
        for (int n = 0; n < Columns / 16; ++n) {
            uint32_t b[4];
            load_matrices<false>(b, of_right.at(right, 16 * n, 2 * k));
            multiply_add(products[2 * n], a, b[0], b[1]);
            multiply_add(products[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Weights [16,Columns] of a warp, as left operands.
template <int Columns>
using Weights = uint32_t[Columns / 16][4];

// Each of Count sums [16,D] += its weights [16,Columns] times the rows of one tile.
template <int D, int Columns, int Count>
__device__ __forceinline__ void add_products(float (*sums)[D / 8][4], const Weights<Columns>* weights, const T* tile) {
    const auto of_tile = Lane<D>::of_rows();
#pragma unroll
    for (int k = 0; k < Columns / 16; ++k) {
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
            uint32_t b[4];
            load_matrices<true>(b, of_tile.at(tile, 16 * k, 2 * n));
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                multiply_add(sums[i][2 * n], weights[i][k], b[0], b[1]);
                multiply_add(sums[i][2 * n + 1], weights[i][k], b[2], b[3]);
            }
        }
    }
}

// Rounds two weights of a row, in columns n * 8 + 2 (lane % 4) and the next one, to where they are in a left operand.
// Returns the difference that this makes to their sum.
template <int Columns>
__device__ __forceinline__ float set_weights(Weights<Columns>& weights, int n, int row, float first, float second) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(first, second);
    memcpy(&weights[n / 2][n % 2 * 2 + row], &rounded, sizeof(rounded));
    return (__low2float(rounded) - first) + (__high2float(rounded) - second);
}

template <int Count, int D>
__device__ __forceinline__ void clear(float (&sums)[Count][D][4]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
#pragma unroll
        for (int n = 0; n < D; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sums[i][n][e] = 0.0f;
            }
        }
    }
}

// Stores sums [16,D], with a factor for each row of a lane, to the rows of a head from `first` on that are below `end`.
template <int N>
__device__ __forceinline__ void store_rows(const float (&sums)[N][4], const float (&factors)[2], const Head<T>& head,
                                           int first, int end) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = first + lane / 4 + 8 * i;
        if (row < end) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int column = 8 * n + 2 * (lane % 4);
                if (column < head.columns) {
                    const float pair[2] = {sums[n][2 * i] * factors[i], sums[n][2 * i + 1] * factors[i]};
                    Vec<T, 2>::from_float(pair).store(head.data + row * head.stride + column);
                }
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- scores

constexpr float log2_e = 1.4426950408889634f;

// Scores by powers of two: p = exp2(score - lse log2(e)).
struct Scores {
    float factor, cap;

    __device__ __forceinline__ explicit Scores(const Sizes& sizes)
        : factor(sizes.softcap > 0 ? sizes.scale / sizes.softcap : sizes.scale * log2_e), cap(sizes.softcap * log2_e) {}

    // Returns the score of a product of a query and a key, and its derivative by the scaled product.
    __device__ __forceinline__ float2 of(float product) const {
        const float x = product * factor;
        if (cap > 0) {
            const float t = bounded(x);
            return make_float2(cap * t, 1.0f - t * t);
        }
        return make_float2(x, 1.0f);
    }

private:
    // tanh(x) with an absolute error of a few 2^-24, which is as good as a relative one where scores are exponents.
    static __device__ __forceinline__ float bounded(float x) {
        return 1.0f - __fdividef(2.0f, exp2f(2.0f * log2_e * x) + 1.0f);
    }
};

// ----------------------------------------------------------------------------------------------------------- host code

// Calls launch(integral constant D).
template <class Launch>
void dispatch(const Sizes& sizes, Launch launch) {
    switch ((sizes.head_dim + 31) / 32) {
        case 1:
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

// ------------------------------------------------------------------------------------------------------------ backward

// Heads of more than 128 have too many sums for the registers of a warp. There two warps have the same rows: one multiplies
// p, the other ds.
template <int D>
constexpr bool divided = D > 128;
template <int D>
constexpr int bwd_warps = most_owned / rows_of_warp * (divided<D> ? 2 : 1);
template <int D>
constexpr int bwd_threads = 32 * bwd_warps<D>;
template <int D>
constexpr int bwd_blocks = D == 64 ? 3 : divided<D> ? 1 : 2;  // that the registers of an SM should suffice for
constexpr int bwd_streamed = 32;  // rows of a streamed tile
template <int D>
constexpr int bwd_products = divided<D> ? 1 : 2;  // sums [16,D] of a warp
template <int D>
constexpr int bwd_shared_bytes = 2 * (most_owned + bwd_streamed) * D * static_cast<int>(sizeof(T));

// Computes dk and dv of attention_mma_bwd (attention_mma_dkdv.cu).
void attention_dkdv(const Backward<T>& tensors, const Sizes& sizes, const char* op, cudaStream_t stream);

}  // namespace surogate::attention::mma
