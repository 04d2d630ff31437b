// mxfp4_amax     amax [matrices, 2] of the dequantized weight
// mxfp4_to_e4m3  its copy in E4M3 with one scale, [R, K] or transposed [K, R]
// mxfp4_to_e5m2  the same in E5M2, with a power of two as scale
//
// <surogate/e4m3_copy.cuh> has formulas, grids and alignments; dequantize.cu has the layout of what is stored. The bits
// are those of the references in `surogate_qlora_mxfp4.reference`.
//
// All elements of a block have one of 16 bytes: those of eight magnitudes and, but for NaN, the same with another sign.
// A thread has four halves of blocks.
//
// Bytes moved per element: 0.53125 read, 1 written. A copy in E5M2 is exact where the exponents of blocks that share its scale
// spread by at most 28. In E4M3 a power of two as scale would be exact for 14; 448 / amax, the scale of all formats, rounds.
#include <surogate/e4m3_copy.cuh>

#include "mxfp4.cuh"

namespace surogate {
namespace {

constexpr int half_block = 16;

template <class T>
struct Mxfp4Source {
    using Dtype = T;
    struct Raw {
        uint2 codes[4];
        uint8_t scales[4];
    };

    const uint8_t* codes;
    const uint8_t* scales;
    int64_t columns;
    FusedRows fused;

    __device__ __forceinline__ Raw load(const CopyPlace& place) const {
        const uint2* own = reinterpret_cast<const uint2*>(codes) + place.first;
        uint32_t unit = place.first;  // rows have an even number of them
        Raw raw;
#pragma unroll
        for (int i = 0; i < 4; ++i, own += place.units, unit += place.units) {
            raw.codes[i] = __ldcs(own);
            raw.scales[i] = __ldg(scales + unit / (mxfp4_block / half_block));
        }
        return raw;
    }

    template <class Code = E4m3Code>
    __device__ __forceinline__ void encode(const Raw& raw, float encode, uint32_t (&bytes)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const ByteTable table = table_of<Code>(float_of_e8m0(raw.scales[i]), encode);
            table.look_up(raw.codes[i].x, bytes[i][0], bytes[i][1]);
            table.look_up(raw.codes[i].y, bytes[i][2], bytes[i][3]);
        }
    }

    __device__ __forceinline__ void octet(int, int64_t row, int64_t column, float (&x)[8]) const {
        const int64_t at = row * columns + column;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + at / 2);
        const float scale = float_of_e8m0(scales[at / mxfp4_block]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = __fmul_rn(e2m1_levels[word >> 4 * i & 15u], scale);
        }
    }

private:
    template <class Code>
    static __device__ __forceinline__ ByteTable table_of(float scale, float encode) {
        const auto value = [&](int code) { return __fmul_rn(e2m1_levels[code], scale); };
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

// Calls function(source) for the source of this dtype.
template <class Function>
void with_source(const Mxfp4Weight& weight, const Mxfp4Shape& shape, int dtype, const char* op, Function&& function) {
    check_weight(weight, shape.columns, dtype, op);
    const auto call = [&](auto source) {
        source.codes = static_cast<const uint8_t*>(weight.codes);
        source.scales = static_cast<const uint8_t*>(weight.scales);
        source.columns = shape.columns;
        source.fused = fused_rows(
            shape.rows, [&](int64_t rows) { return amax_chunks(rows, shape.columns); },
            [](int64_t) { return int64_t{1}; }, op);
        function(source);
    };
    dtype == BF16 ? call(Mxfp4Source<__nv_bfloat16>{}) : call(Mxfp4Source<float>{});
}

}  // namespace

void mxfp4_amax(const Mxfp4Weight& weight, void* amax, const Mxfp4Shape& shape, int dtype, cudaStream_t stream) {
    constexpr const char* op = "mxfp4_amax";
    with_source(weight, shape, dtype, op, [&](const auto& source) { stored_amax(source, amax, op, stream); });
}

void mxfp4_to_e4m3(const Mxfp4Weight& weight, const void* amax, void* copy, void* scale, bool transposed,
                   const Mxfp4Shape& shape, int dtype, cudaStream_t stream) {
    constexpr const char* op = "mxfp4_to_e4m3";
    with_source(weight, shape, dtype, op,
                [&](const auto& source) { e4m3_copy(source, amax, {copy, scale, transposed}, op, stream); });
}

void mxfp4_to_e5m2(const Mxfp4Weight& weight, const void* amax, void* copy, void* scale, bool transposed,
                   const Mxfp4Shape& shape, int dtype, cudaStream_t stream) {
    constexpr const char* op = "mxfp4_to_e5m2";
    with_source(weight, shape, dtype, op,
                [&](const auto& source) { e4m3_copy<E5m2Code>(source, amax, {copy, scale, transposed}, op, stream); });
}

}  // namespace surogate
