// fp4_block_amax     amax [matrices, 2] of the dequantized weight
// fp4_block_to_e4m3  its copy in E4M3 with one scale, [R, K] or transposed [K, R]
//
// <surogate/e4m3_copy.cuh> has formulas, grids and alignments; dequantize.cu has the layout of what is stored. The bits
// are those of the references in `surogate_qlora_fp4.reference`.
//
// All elements of a block have one of 16 bytes: those of eight magnitudes and, but for NaN, the same with another sign.
// A thread has four blocks. So the arithmetic of an element is half that of dequantizing it, and a lookup in 16 bytes.
//
// Bytes moved per element: 0.5625 read, 1 written. 4,096 x 12,288: 78.6 MB, a floor of 18.5 us at 4.26 TB/s. For the
// 6.95 G weights in the blocks of Qwen3-8B: 2.5 ms a pass. Instructions per element, counted in the code for SM90:
// 6.5, transposed 8.0 of which 4.5 are of integers or conversions. An SM moves 13.8 elements per clock at 4.26 TB/s and
// 1.5 GHz, so these fill 86 % of its issue slots, and 97 % of those for integers. Expected: at least 80 % of bandwidth.
#include <surogate/e4m3_copy.cuh>

#include "fp4.cuh"

namespace surogate {
namespace {

template <class T>
struct Fp4Source {
    using Dtype = T;
    struct Raw {
        uint2 codes[4];
        uint8_t scales[4];
        float global_scale;
    };

    const uint8_t* codes;
    const uint8_t* scales;
    const float* global_scales;
    int64_t columns;
    FusedRows fused;

    __device__ __forceinline__ Raw load(const CopyPlace& place) const {
        const uint2* own = reinterpret_cast<const uint2*>(codes) + place.first;
        const uint8_t* scale = scales + place.first;
        Raw raw;
#pragma unroll
        for (int i = 0; i < 4; ++i, own += place.units, scale += place.units) {
            raw.codes[i] = __ldcs(own);
            raw.scales[i] = __ldg(scale);
        }
        raw.global_scale = __ldg(global_scales + place.matrix_in(fused));
        return raw;
    }

    __device__ __forceinline__ void encode(const Raw& raw, float encode, uint32_t (&bytes)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const ByteTable table = table_of(float_of_e4m3(raw.scales[i]), raw.global_scale, encode);
            table.look_up(raw.codes[i].x, bytes[i][0], bytes[i][1]);
            table.look_up(raw.codes[i].y, bytes[i][2], bytes[i][3]);
        }
    }

    __device__ __forceinline__ void octet(int matrix, int64_t row, int64_t column, float (&x)[8]) const {
        const int64_t at = row * columns + column;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + at / 2);
        const float scale = float_of_e4m3(scales[at / fp4_block]), global_scale = global_scales[matrix];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = __fmul_rn(__fmul_rn(e2m1_levels[word >> 4 * i & 15u], scale), global_scale);
        }
    }

private:
    static __device__ __forceinline__ ByteTable table_of(float scale, float global_scale, float encode) {
        const auto value = [&](int code) { return __fmul_rn(__fmul_rn(e2m1_levels[code], scale), global_scale); };
        ByteTable table;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int code = 4 * k;
            const uint32_t word = e4m3_word<T>(value(code), value(code + 1), value(code + 2), value(code + 3), encode);
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
void with_source(const Fp4Weight& weight, const Fp4Shape& shape, int dtype, const char* op, Function&& function) {
    check_weight(weight, shape, dtype, op);
    const auto call = [&](auto source) {
        source.codes = static_cast<const uint8_t*>(weight.codes);
        source.scales = static_cast<const uint8_t*>(weight.scales);
        source.global_scales = static_cast<const float*>(weight.global_scales);
        source.columns = shape.columns;
        source.fused = fused_rows(
            shape.rows, [&](int64_t rows) { return amax_chunks(rows, shape.columns); },
            [](int64_t) { return int64_t{1}; }, op);
        function(source);
    };
    dtype == BF16 ? call(Fp4Source<__nv_bfloat16>{}) : call(Fp4Source<float>{});
}

}  // namespace

void fp4_block_amax(const Fp4Weight& weight, void* amax, const Fp4Shape& shape, int dtype, cudaStream_t stream) {
    constexpr const char* op = "fp4_block_amax";
    with_source(weight, shape, dtype, op,
                [&](const auto& source) { stored_amax(source, amax, op, stream); });
}

void fp4_block_to_e4m3(const Fp4Weight& weight, const void* amax, void* copy, void* scale, bool transposed,
                       const Fp4Shape& shape, int dtype, cudaStream_t stream) {
    constexpr const char* op = "fp4_block_to_e4m3";
    with_source(weight, shape, dtype, op,
                [&](const auto& source) { e4m3_copy(source, amax, {copy, scale, transposed}, op, stream); });
}

}  // namespace surogate
