// Copies of a stored weight in FP8 with one scale for the whole param, and the amax that this scale needs.
//
//   stored_amax(source, amax, op, stream);
//   e4m3_copy(source, amax, {copy, scale, transposed}, op, stream);
//   e4m3_copy<E5m2Code>(...)   in E5M2, which holds numbers of two significant bits
//
//   w = the weight as the format dequantizes it, rounded to the model's dtype T
//   amax [matrices, 2] = (largest finite |w|, 1 if a w is not finite) of each matrix that is fused in the param
//   encode = min(448 / max(amax), FLT_MAX), 1 if that maximum is 0
//   copy [R, K], or transposed [K, R] = E4M3(w * encode), to nearest even; magnitudes above 448 become 448, NaN 0x7F
//   scale [2] = (1 / encode, encode); 1 / encode is NaN if a w is not finite
//
// In E5M2 encode is the power of two that maps max(amax) to at least 2^15 and less than 2^16, at most 2^127, and magnitudes
// above 57344 become that.
//
// Each operation is rounded separately, so the bits are those of `fp8_quantize` with current scaling of the dequantized
// weight. w is never written: of every element the stored form is read, and one byte is written.
//
// A Source is what a format stores, passed to the kernel by value:
//
//   Raw                                             what a thread loads: four rows of 16 adjacent columns
//   Raw load(const CopyPlace&) const
//   void encode<Code>(const Raw&, float encode, uint32_t (&bytes)[4][4]) const
//                                                   the bytes of the copy, four columns in a word. Every lane calls it.
//                                                   Without the template in sources that are copied to E4M3 alone.
//   void octet(const FusedMatrix& matrix, int64_t row, int64_t column, float (&x)[8]) const
//                                                   w in fp32, before it is rounded to T, of eight adjacent columns
//   Dtype                                           T: float or __nv_bfloat16
//   columns                                         K
//   fused                                           the matrices, a matrix in chunks of `amax_chunks`
//
// e4m3_copy: the rows of every matrix and K are multiples of 16, so the 16 rows of a warp belong to one matrix. Grid: a
// block of 256 threads per tile of 128 x 128. Eight lanes have adjacent columns: a warp writes 128 bytes of four rows
// per instruction. A transposed tile is exchanged through 16.1 KiB of shared memory, and its rows of 128 bytes are
// written by eight lanes each.
//
// At 4.26 TB/s and 1.5 GHz an SM moves 21.5 bytes per clock, in which it issues 128 instructions, of which 64 may be of
// integers. The files that use this header state what they take of that.
//
// stored_amax: K is a multiple of 8. It runs once, when a weight is loaded.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "surogate/check.h"
#include "surogate/fused_rows.cuh"
#include "surogate/quantize_tile.cuh"
#include "surogate/reduce.cuh"
#include "surogate/words.cuh"

namespace surogate {

using CopyTile = QuantizeTile<128, 128, 16>;

// What `e4m3_copy` writes. of: the matrices of the amax, of which the source has some; 0: those of the source.
struct E4m3Copy {
    void* copy;
    void* scale;
    bool transposed;
    int64_t of = 0;
};

struct E4m3Code {
    static constexpr __nv_fp8_interpretation_t format = __NV_E4M3;

    static __device__ __forceinline__ float encode_of(float top) {
        return top == 0.0f ? 1.0f : fminf(__fdiv_rn(448.0f, top), FLT_MAX);
    }
};

struct E5m2Code {
    static constexpr __nv_fp8_interpretation_t format = __NV_E5M2;

    // `top` is 0 or a normal number, of which the bits have the exponent.
    static __device__ __forceinline__ float encode_of(float top) {
        constexpr unsigned bias = 127, largest = 15;
        const unsigned exponent = min(2 * bias + largest - (__float_as_uint(top) >> 23), 2 * bias);
        return top == 0.0f ? 1.0f : __uint_as_float(exponent << 23);
    }
};

// Rounds two floats to T and multiplies them by `encode`. Returns their codes, the first in the lower byte.
template <class T, class Code = E4m3Code>
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high, float encode) {
    if constexpr (sizeof(T) == 2) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        uint32_t bits;
        memcpy(&bits, &pair, sizeof(bits));
        low = __uint_as_float(bits << 16);
        high = __uint_as_float(bits & 0xffff0000u);
    }
    return __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(low, encode), __fmul_rn(high, encode)), __NV_SATFINITE,
                                    Code::format);
}

template <class T, class Code = E4m3Code>
__device__ __forceinline__ uint32_t e4m3_word(float a, float b, float c, float d, float encode) {
    return e4m3_pair<T, Code>(a, b, encode) | e4m3_pair<T, Code>(c, d, encode) << 16;
}

// 16 bytes, looked up by 4-bit codes. Eight lookups take eleven instructions.
struct ByteTable {
    uint32_t word[4];

    // Looks up the eight codes of `codes`, the lowest bits first.
    __device__ __forceinline__ void look_up(uint32_t codes, uint32_t& first, uint32_t& second) const {
        const uint32_t inside = codes & 0x77777777u;                      // of the lower or the upper half of the table
        const uint32_t half = (codes >> 1 & 0x44444444u) | 0x32103210u;  // bytes of the results in these halves
        first = permuted(inside, half);
        second = permuted(inside >> 16, half >> 16);
    }

private:
    __device__ __forceinline__ uint32_t permuted(uint32_t inside, uint32_t half) const {
        return permute(permute(word[0], word[1], inside), permute(word[2], word[3], inside), half);
    }
    // `__byte_perm` would mask the selector again.
    static __device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
        uint32_t result;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
        return result;
    }
};

// Where a thread's four rows of 16 columns begin. In 32 bits: a weight has less than 2^32 units of 16 elements.
struct CopyPlace {
    int row;         // a multiple of 4
    int column;      // a multiple of 16
    int units;       // of a row: columns / 16
    uint32_t first;  // unit of the weight

    // Returns the matrix of the row, which is the same in all lanes of a warp.
    __device__ __forceinline__ FusedMatrix matrix_in(const FusedRows& fused) const { return fused.of_row(row); }
};

namespace detail {

template <class Code>
struct TensorScale {
    float encode;
    bool finite;

    // Every lane of the warp calls it. Magnitudes are not negative, so their bits have the same order.
    __device__ __forceinline__ TensorScale(const float2* __restrict__ amax, int matrices) {
        unsigned largest = 0;
        bool found = false;
        for (int i = threadIdx.x % 32; i < matrices; i += 32) {
            const float2 one = __ldg(amax + i);
            largest = max(largest, __float_as_uint(one.x));
            found |= one.y != 0.0f;
        }
        const float top = __uint_as_float(__reduce_max_sync(full_warp, largest));
        const bool other = __any_sync(full_warp, found);
        encode = Code::encode_of(top);
        finite = !other;
    }
};

template <class Source, class Code, bool Transposed>
__global__ void __launch_bounds__(CopyTile::threads, 4)
    e4m3_copy_kernel(const __grid_constant__ Source source, const float2* __restrict__ amax, int matrices,
                     uint8_t* __restrict__ copy, float* __restrict__ scale, int rows, int columns) {
    __shared__ __align__(16) uint32_t staged[Transposed ? CopyTile::words : 1];
    const int first_row = blockIdx.y * CopyTile::rows, first_column = blockIdx.x * CopyTile::columns;
    const int row = first_row + CopyTile::row(), column = first_column + CopyTile::column();
    const bool inside = row < rows && column < columns;
    CopyPlace place{inside ? row : 0, inside ? column : 0, columns / 16};
    place.first = static_cast<uint32_t>(place.row) * place.units + place.column / 16;
    const auto raw = source.load(place);
    const TensorScale<Code> own(amax, matrices);
    uint32_t bytes[4][4];
    if constexpr (std::is_same_v<Code, E4m3Code>) {
        source.encode(raw, own.encode, bytes);
    } else {
        source.template encode<Code>(raw, own.encode, bytes);
    }
    if constexpr (Transposed) {
        CopyTile::stage(staged, bytes);
        __syncthreads();
        CopyTile::write(staged, copy, first_row, first_column, rows, columns);
    } else if (inside) {
        uint8_t* to = copy + int64_t{place.first} * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i, to += columns) {
            // nvcc 13.0 may split a store after shuffles: see `store_whole`.
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                         "r"(bytes[i][0]), "r"(bytes[i][1]), "r"(bytes[i][2]), "r"(bytes[i][3]));
        }
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        scale[0] = own.finite ? __fdiv_rn(1.0f, own.encode) : __int_as_float(0x7fc00000);
        scale[1] = own.encode;
    }
}

constexpr int amax_threads = 256;
constexpr int amax_octets = 8;  // of a thread

template <class Source>
__global__ void __launch_bounds__(amax_threads)
    stored_amax_kernel(const __grid_constant__ Source source, float* amax, int64_t octets_per_row,
                       const __grid_constant__ FusedRows fused) {
    __shared__ uint32_t tops[amax_threads / 32];
    const FusedMatrix matrix = fused.of_chunk(blockIdx.x);
    const int64_t chunk = (blockIdx.x - matrix.first_chunk) * amax_threads * amax_octets;
    const int64_t count = (matrix.end_row - matrix.first_row) * octets_per_row;
    AbsMax top;
    for (int i = 0; i < amax_octets; ++i) {
        const int64_t at = chunk + i * amax_threads + threadIdx.x;
        if (at < count) {
            float x[octet];
            source.octet(matrix, matrix.first_row + at / octets_per_row, at % octets_per_row * octet, x);
            const auto rounded = Words<typename Source::Dtype>::nearest(x);
#pragma unroll
            for (int k = 0; k < octet; ++k) {
                top.add(rounded.get(k));
            }
        }
    }
    top.stage(tops);
    __syncthreads();
    AbsMax::raise(tops, amax + 2 * matrix.index);
}

}  // namespace detail

// The chunks of `stored_amax` of a matrix of `rows` rows, for `fused_rows`.
inline int64_t amax_chunks(int64_t rows, int64_t columns) {
    return ceil_div(rows * (columns / octet), int64_t{detail::amax_threads} * detail::amax_octets);
}

template <class Source>
void stored_amax(const Source& source, void* amax, const char* op, cudaStream_t stream) {
    check_pointer(amax, op, "amax", 8);
    check_cuda(cudaMemsetAsync(amax, 0, 2 * sizeof(float) * source.fused.count, stream), op);
    detail::stored_amax_kernel<<<source.fused.chunks(op), detail::amax_threads, 0, stream>>>(
        source, static_cast<float*>(amax), source.columns / octet, source.fused);
    check_launch(op);
}

template <class Code = E4m3Code, class Source>
void e4m3_copy(const Source& source, const void* amax, const E4m3Copy& to, const char* op, cudaStream_t stream) {
    const FusedRows& fused = source.fused;
    const int64_t columns = source.columns;
    for (int i = 0; i < fused.runs; ++i) {
        SUROGATE_REQUIRE(fused.run[i].rows % 16 == 0, op,
                         "the rows of each matrix must be a multiple of 16, got " + std::to_string(fused.run[i].rows));
    }
    SUROGATE_REQUIRE(columns % 16 == 0, op, "columns must be a multiple of 16, got " + std::to_string(columns));
    check_pointer(amax, op, "amax", 8);
    check_pointer(to.copy, op, "copy", 16);
    check_pointer(to.scale, op, "scale", 8);
    SUROGATE_REQUIRE(to.of == 0 || to.of >= fused.count, op,
                     "amax is of " + std::to_string(to.of) + " matrices, the weight has " + std::to_string(fused.count));
    const int matrices = to.of == 0 ? fused.count : to_int(to.of, op, "the matrices of amax");
    const int64_t rows = fused.rows, high = ceil_div(rows, CopyTile::rows);
    SUROGATE_REQUIRE(high <= 65535, op, "rows must not exceed 8388480, got " + std::to_string(rows));
    SUROGATE_REQUIRE(rows * columns >> 36 == 0, op, "the weight must have less than 2^36 elements");
    const dim3 grid(to_int(ceil_div(columns, CopyTile::columns), op, "columns"), static_cast<unsigned>(high));
    const auto kernel =
        to.transposed ? detail::e4m3_copy_kernel<Source, Code, true> : detail::e4m3_copy_kernel<Source, Code, false>;
    kernel<<<grid, CopyTile::threads, 0, stream>>>(source, static_cast<const float2*>(amax), matrices,
                                                   static_cast<uint8_t*>(to.copy), static_cast<float*>(to.scale),
                                                   static_cast<int>(rows), to_int(columns, op, "columns"));
    check_launch(op);
}

}  // namespace surogate
