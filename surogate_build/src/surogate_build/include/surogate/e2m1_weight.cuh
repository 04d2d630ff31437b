// Weights in E2M1 with a scale for each block of a row: dequantizing, amax, and copies in FP8.
//
//   w = level[code] * scale[block], rounded to fp32, and where there are global scales * global_scale[matrix], rounded to fp32
//
//   e2m1_dequantize<Scale>(weight, out, op, stream);
//   e2m1_amax<Scale>(weight, amax, op, stream);
//   e2m1_copy<Scale, Code>(weight, amax, {copy, scale, transposed}, op, stream);
//
//   codes          uint8 [R, K / 2], the first element of a byte in its lower half; aligned to 16 bytes
//   scales         uint8 [R, K / block]
//   global_scales  fp32 [matrices], if the format has them
//
// A Scale is what a format has of its own:
//
//   block             elements of a row that share a scale, a multiple of 16 by which K is divisible
//   is_global         whether there are global scales
//   float of(code)    the scale of a byte
//
// e2m1_dequantize: out, bf16 or fp32 [R, K], is aligned to 16 bytes. Grid: a block of 256 threads per 8,192 elements of a matrix. A
// thread decodes four times eight codes, whose loads it issues first. Consecutive threads have consecutive octets, so a warp
// reads 128 bytes and writes 512 bytes (bf16) per instruction.
//
// e4m3_copy.cuh has the grids of the others. There a thread has four times 16 elements, all of one of 16 bytes: those of eight
// magnitudes and, but for NaN, the same with another sign. So the arithmetic of an element is half that of dequantizing it, and
// a lookup in 16 bytes.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/e4m3_copy.cuh"
#include "surogate/fused_rows.cuh"
#include "surogate/table16.cuh"

namespace surogate {

// By code: the sign is the upper bit.
__device__ constexpr float e2m1_levels[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// A param of matrices fused along its rows. dtype: of the dequantized weight.
struct E2m1Weight {
    const void *codes, *scales, *global_scales;
    const std::vector<int64_t>& rows;
    int64_t columns;
    int dtype;

    // Returns the matrices, where a matrix of some rows has `chunks(rows)`.
    template <class Chunks>
    FusedRows fused(Chunks&& chunks, const char* op) const {
        return fused_rows(rows, chunks, [](int64_t) { return int64_t{1}; }, op);
    }
};

template <class Scale>
void check_weight(const E2m1Weight& weight, const char* op) {
    check_positive(weight.columns, op, "columns");
    SUROGATE_REQUIRE(weight.columns % Scale::block == 0, op,
                     "columns must be a multiple of " + std::to_string(Scale::block) + ", got " + std::to_string(weight.columns));
    check_pointer(weight.codes, op, "codes", 16);
    check_pointer(weight.scales, op, "scales");
    if (Scale::is_global) {
        check_pointer(weight.global_scales, op, "global_scales", 4);
    }
    SUROGATE_REQUIRE(weight.dtype == FP32 || weight.dtype == BF16, op, "the weight must be fp32 or bf16");
}

namespace detail {

// Returns a level, or a number of levels, times its scales.
template <class Scale>
__device__ __forceinline__ float scaled_level(float level, float scale, float global_scale) {
    const float x = __fmul_rn(level, scale);
    if constexpr (Scale::is_global) {
        return __fmul_rn(x, global_scale);
    }
    return x;
}

// The scales of a chunk.
template <class Scale>
struct ChunkScales {
    using Loaded = unsigned char;

    const unsigned char* __restrict__ scales;
    float global_scale;

    __device__ __forceinline__ Loaded load(uint32_t i) const { return __ldca(scales + i * octet / Scale::block); }
    __device__ __forceinline__ void apply(Loaded code, float (&x)[octet]) const {
        const float scale = Scale::of(code);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = scaled_level<Scale>(x[i], scale, global_scale);
        }
    }
};

template <class Scale, class T>
__global__ void __launch_bounds__(decode_threads)
    e2m1_dequantize_kernel(const uint32_t* __restrict__ codes, const unsigned char* __restrict__ scales,
                           const float* __restrict__ global_scales, T* __restrict__ out, int64_t octets_per_row,
                           const __grid_constant__ FusedRows fused) {
    const Table16 table(e2m1_levels);
    const FusedMatrix matrix = fused.of_chunk(blockIdx.x);
    const int64_t inside = (blockIdx.x - matrix.first_chunk) * chunk_octets;
    const int64_t first = matrix.first_row * octets_per_row + inside;
    const int64_t count = matrix.end_row * octets_per_row - first;
    const ChunkScales<Scale> own{scales + first * octet / Scale::block, Scale::is_global ? global_scales[matrix.index] : 1.0f};
    decode_chunk<false>(table, codes + first, out + first * octet, count, own);
}

// A source of e4m3_copy.cuh.
template <class Scale, class T>
struct E2m1Source {
    static constexpr int unit = 16;
    using Dtype = T;
    struct Raw {
        uint2 codes[4];
        uint8_t scales[4];
        float global_scale;
    };

    const uint8_t *codes, *scales;
    const float* global_scales;
    int64_t columns;
    FusedRows fused;

    __device__ __forceinline__ Raw load(const CopyPlace& place) const {
        const uint2* own = reinterpret_cast<const uint2*>(codes) + place.first;
        constexpr int units = Scale::block / unit;  // of a block, of which rows have whole ones
        const uint8_t* scale = scales + place.first / units;
        Raw raw;
#pragma unroll
        for (int i = 0; i < 4; ++i, own += place.units, scale += place.units / units) {
            raw.codes[i] = __ldcs(own);
            raw.scales[i] = __ldg(scale);
        }
        raw.global_scale = Scale::is_global ? __ldg(global_scales + place.matrix_in(fused).index) : 1.0f;
        return raw;
    }

    template <class Code = E4m3Code>
    __device__ __forceinline__ void encode(const Raw& raw, float encode, uint32_t (&bytes)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const ByteTable table = table_of<Code>(Scale::of(raw.scales[i]), raw.global_scale, encode);
            table.look_up(raw.codes[i].x, bytes[i][0], bytes[i][1]);
            table.look_up(raw.codes[i].y, bytes[i][2], bytes[i][3]);
        }
    }

    __device__ __forceinline__ void octet(const FusedMatrix& matrix, int64_t row, int64_t column, float (&x)[8]) const {
        const int64_t at = row * columns + column;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + at / 2);
        const float scale = Scale::of(scales[at / Scale::block]), global_scale = Scale::is_global ? global_scales[matrix.index] : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = scaled_level<Scale>(e2m1_levels[word >> 4 * i & 15u], scale, global_scale);
        }
    }

private:
    template <class Code>
    static __device__ __forceinline__ ByteTable table_of(float scale, float global_scale, float encode) {
        const auto value = [&](int code) { return scaled_level<Scale>(e2m1_levels[code], scale, global_scale); };
        ByteTable table;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int code = 4 * k;
            const uint32_t word =
                e4m3_word<T, Code>(value(code), value(code + 1), value(code + 2), value(code + 3), encode);
            // The carry of the lower seven bits marks the bytes 0x7F, which are NaN and have no sign. There is no 0xFF.
            const uint32_t nan = (word & 0x7f7f7f7fu) + 0x01010101u;
            table.word[k] = word;
            table.word[k + 2] = word ^ (~nan & 0x80808080u);
        }
        return table;
    }
};

// Calls function(source) for the source of the weight's dtype.
template <class Scale, class Function>
void with_e2m1_source(const E2m1Weight& weight, const char* op, Function&& function) {
    check_weight<Scale>(weight, op);
    const auto call = [&](auto source) {
        source.codes = static_cast<const uint8_t*>(weight.codes);
        source.scales = static_cast<const uint8_t*>(weight.scales);
        source.global_scales = static_cast<const float*>(weight.global_scales);
        source.columns = weight.columns;
        source.fused = weight.fused([&](int64_t rows) { return amax_chunks(rows, weight.columns); }, op);
        function(source);
    };
    weight.dtype == BF16 ? call(E2m1Source<Scale, __nv_bfloat16>{}) : call(E2m1Source<Scale, float>{});
}

}  // namespace detail

template <class Scale>
void e2m1_dequantize(const E2m1Weight& weight, void* out, const char* op, cudaStream_t stream) {
    check_weight<Scale>(weight, op);
    check_pointer(out, op, "out", 16);
    const auto chunks = [&](int64_t rows) { return ceil_div(rows * weight.columns, int64_t{chunk_octets} * octet); };
    const FusedRows fused = weight.fused(chunks, op);
    const auto launch = [&](auto* to) {
        using T = std::remove_pointer_t<decltype(to)>;
        detail::e2m1_dequantize_kernel<Scale, T><<<fused.chunks(op), decode_threads, 0, stream>>>(
            static_cast<const uint32_t*>(weight.codes), static_cast<const unsigned char*>(weight.scales),
            static_cast<const float*>(weight.global_scales), to, weight.columns / octet, fused);
    };
    weight.dtype == BF16 ? launch(static_cast<__nv_bfloat16*>(out)) : launch(static_cast<float*>(out));
    check_launch(op);
}

template <class Scale>
void e2m1_amax(const E2m1Weight& weight, void* amax, const char* op, cudaStream_t stream) {
    detail::with_e2m1_source<Scale>(weight, op, [&](const auto& source) { stored_amax(source, amax, op, stream); });
}

template <class Scale, class Code = E4m3Code>
void e2m1_copy(const E2m1Weight& weight, const void* amax, const E4m3Copy& to, const char* op, cudaStream_t stream) {
    detail::with_e2m1_source<Scale>(weight, op,
                                    [&](const auto& source) { e4m3_copy<Code>(source, amax, to, op, stream); });
}

}  // namespace surogate
