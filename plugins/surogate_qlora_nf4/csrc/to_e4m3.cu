// nf4_amax     amax [matrices, 2] of the dequantized weight
// nf4_to_e4m3  its copy in E4M3 with one scale, [R, K] or transposed [K, R]
//
// <surogate/e4m3_copy.cuh> has formulas, grids and alignments; dequantize.cu has the layout of what is stored. The bits
// are those of the references in `surogate_qlora_nf4.reference`.
//
// All elements of a block have one of 16 bytes. A lane computes those of one row for 64 columns, which four lanes have,
// and gets those of the other rows by shuffles. So the arithmetic of an element is a lookup in 16 bytes.
//
// Bytes moved per element, block 64: 0.516 with double quantization (0.563 without) read, 1 written. 4,096 x 12,288:
// 76.3 MB, a floor of 17.9 us at 4.26 TB/s. For the 6.95 G weights in the blocks of Qwen3-8B: 2.5 ms a pass.
// Instructions per element, counted in the code for SM90: 5.4, transposed 6.9 of which 3.9 are of integers. An SM moves
// 14.2 elements per clock at 4.26 TB/s and 1.5 GHz, so these fill 77 % of its issue slots, and 86 % of those for
// integers. Expected: at least 80 % of bandwidth.
#include <surogate/e4m3_copy.cuh>

#include "nf4.cuh"

namespace surogate {
namespace {

template <class T, bool Double>
struct Nf4Source {
    using Dtype = T;
    struct Raw {
        uint2 codes[4];
        float absmax;  // of row lane % 4 of the four
    };

    const uint2* codes;  // of 16 elements each
    const void* absmax;
    const float* nested;
    const float* offset;
    const float* map;
    int64_t columns;
    int shift;  // a block has 16 << shift elements
    int blocks_per_row;
    FusedRows fused;

    __device__ __forceinline__ Raw load(const CopyPlace& place) const {
        const uint2* own = codes + place.first;
        Raw raw;
#pragma unroll
        for (int i = 0; i < 4; ++i, own += place.units) {
            raw.codes[i] = __ldcs(own);
        }
        const uint32_t unit = place.first + threadIdx.x % 4 * place.units;
        raw.absmax = absmax_of(place.matrix_in(fused), unit >> shift);
        return raw;
    }

    __device__ __forceinline__ void encode(const Raw& raw, float encode, uint32_t (&bytes)[4][4]) const {
        const auto value = [&](int code) { return __fmul_rn(nf4_levels[code], raw.absmax); };
        ByteTable own;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int code = 4 * k;
            own.word[k] = e4m3_word<T>(value(code), value(code + 1), value(code + 2), value(code + 3), encode);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ByteTable table;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                table.word[k] = __shfl_sync(full_warp, own.word[k], i, 4);
            }
            table.look_up(in_order(raw.codes[i].x), bytes[i][0], bytes[i][1]);
            table.look_up(in_order(raw.codes[i].y), bytes[i][2], bytes[i][3]);
        }
    }

    __device__ __forceinline__ void octet(const FusedMatrix& matrix, int64_t row, int64_t column, float (&x)[8]) const {
        const int64_t at = row * columns + column;
        const uint32_t word = in_order(reinterpret_cast<const uint32_t*>(codes)[at / 8]);
        const float a = absmax_of(matrix, static_cast<uint32_t>(at / 16 >> shift));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = __fmul_rn(nf4_levels[word >> 4 * i & 15u], a);
        }
    }

private:
    // Puts the first element of each byte in its lower half.
    static __device__ __forceinline__ uint32_t in_order(uint32_t codes) {
        return (codes >> 4 & 0x0f0f0f0fu) | (codes << 4 & 0xf0f0f0f0u);
    }

    __device__ __forceinline__ float absmax_of(const FusedMatrix& matrix, uint32_t block) const {
        if constexpr (Double) {
            const uint32_t inside = block - static_cast<uint32_t>(matrix.first_row) * blocks_per_row;
            const float level = __ldg(map + __ldg(static_cast<const uint8_t*>(absmax) + block));
            const float scale = __ldg(nested + matrix.first_scale + inside / nf4_group);
            return __fadd_rn(__fmul_rn(level, scale), __ldg(offset + matrix.index));
        } else {
            return __ldg(static_cast<const float*>(absmax) + block);
        }
    }
};

// Calls function(source) for the source of this dtype and these scales.
template <class Function>
void with_source(const void* codes, const Nf4Scales& scales, const Nf4Shape& shape, int dtype, const char* op,
                 Function&& function) {
    check_shape(shape, op);
    check_pointer(codes, op, "codes", 16);
    check_pointer(scales.absmax, op, "absmax");
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, "the weight must be fp32 or bf16");
    const auto call = [&](auto source) {
        source.codes = static_cast<const uint2*>(codes);
        source.absmax = scales.absmax;
        source.nested = static_cast<const float*>(scales.nested);
        source.offset = static_cast<const float*>(scales.offset);
        source.map = static_cast<const float*>(scales.map);
        source.columns = shape.columns;
        source.shift = exponent_of(shape.block / 16);
        source.blocks_per_row = to_int(shape.columns / shape.block, op, "blocks of a row");
        source.fused = fused_rows(
            shape.rows, [&](int64_t rows) { return amax_chunks(rows, shape.columns); },
            [&](int64_t rows) { return ceil_div(rows * (shape.columns / shape.block), nf4_group); }, op);
        function(source);
    };
    if (scales.nested == nullptr) {
        return dtype == BF16 ? call(Nf4Source<__nv_bfloat16, false>{}) : call(Nf4Source<float, false>{});
    }
    check_pointer(scales.offset, op, "offset");
    check_pointer(scales.map, op, "map");
    return dtype == BF16 ? call(Nf4Source<__nv_bfloat16, true>{}) : call(Nf4Source<float, true>{});
}

}  // namespace

void nf4_amax(const void* codes, const Nf4Scales& scales, void* amax, const Nf4Shape& shape, int dtype,
              cudaStream_t stream) {
    constexpr const char* op = "nf4_amax";
    with_source(codes, scales, shape, dtype, op,
                [&](const auto& source) { stored_amax(source, amax, op, stream); });
}

void nf4_to_e4m3(const void* codes, const Nf4Scales& scales, const void* amax, void* copy, void* scale, bool transposed,
                 const Nf4Shape& shape, int dtype, cudaStream_t stream) {
    constexpr const char* op = "nf4_to_e4m3";
    with_source(codes, scales, shape, dtype, op,
                [&](const auto& source) { e4m3_copy(source, amax, {copy, scale, transposed}, op, stream); });
}

}  // namespace surogate
