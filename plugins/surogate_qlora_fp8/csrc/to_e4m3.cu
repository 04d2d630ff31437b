// fp8_tile_amax     amax [matrices, 2] of the dequantized weight
// fp8_tile_to_e4m3  its copy in E4M3 with one scale, [R, K] or transposed [K, R]
//
// <surogate/e4m3_copy.cuh> has formulas, grids and alignments; dequantize.cu has the layout of what is stored. The bits
// are those of the references in `surogate_qlora_fp8.reference`.
//
// Bytes moved per element: 1 read, 1 written. 4,096 x 12,288: 100.7 MB, a floor of 23.6 us at 4.26 TB/s. For the 6.95 G
// weights in the blocks of Qwen3-8B: 3.3 ms a pass. Instructions per element, counted in the code for SM90: 7.6,
// transposed 9.1 of which 4.1 are of integers or conversions. An SM moves 10.8 elements per clock at 4.26 TB/s and
// 1.5 GHz, so these fill 77 % of its issue slots. Expected: at least 80 % of bandwidth.
#include <surogate/e4m3_copy.cuh>

#include "tiles.cuh"

namespace surogate {
namespace {

template <class T>
struct TileSource {
    using Dtype = T;
    struct Raw {
        uint4 codes[4];
        float scale;
    };

    const uint8_t* codes;
    const float* scales;
    int64_t columns;
    int tiles_per_row;
    int shift;  // a tile has 1 << shift rows and columns
    FusedRows fused;

    __device__ __forceinline__ Raw load(const CopyPlace& place) const {
        const uint4* own = reinterpret_cast<const uint4*>(codes) + place.first;
        Raw raw;
#pragma unroll
        for (int i = 0; i < 4; ++i, own += place.units) {
            raw.codes[i] = __ldcs(own);
        }
        raw.scale = scale_of(place.matrix_in(fused), place.row, place.column);
        return raw;
    }

    __device__ __forceinline__ void encode(const Raw& raw, float encode, uint32_t (&bytes)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bytes[i][0] = encoded(raw.codes[i].x, raw.scale, encode);
            bytes[i][1] = encoded(raw.codes[i].y, raw.scale, encode);
            bytes[i][2] = encoded(raw.codes[i].z, raw.scale, encode);
            bytes[i][3] = encoded(raw.codes[i].w, raw.scale, encode);
        }
    }

    __device__ __forceinline__ void octet(const FusedMatrix& matrix, int64_t row, int64_t column, float (&x)[8]) const {
        const uint2 words = *reinterpret_cast<const uint2*>(codes + row * columns + column);
        const float scale = scale_of(matrix, static_cast<int>(row), static_cast<int>(column));
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float2 pair = floats_of_e4m3((i < 4 ? words.x : words.y) >> (i % 4 ? 16 : 0) & 0xffffu);
            x[i] = __fmul_rn(pair.x, scale);
            x[i + 1] = __fmul_rn(pair.y, scale);
        }
    }

private:
    __device__ __forceinline__ float scale_of(const FusedMatrix& matrix, int row, int column) const {
        const int inside = row - static_cast<int>(matrix.first_row);
        const int tile_row = static_cast<int>(matrix.first_scale) + (inside >> shift);
        return __ldg(scales + int64_t{tile_row} * tiles_per_row + (column >> shift));
    }

    static __device__ __forceinline__ uint32_t encoded(uint32_t codes, float scale, float encode) {
        const float2 low = floats_of_e4m3(codes & 0xffffu), high = floats_of_e4m3(codes >> 16);
        return e4m3_word<T>(__fmul_rn(low.x, scale), __fmul_rn(low.y, scale), __fmul_rn(high.x, scale),
                            __fmul_rn(high.y, scale), encode);
    }
};

// Calls function(source) for the source of this dtype.
template <class Function>
void with_source(const void* codes, const void* scales, const TileShape& shape, int dtype, const char* op,
                 Function&& function) {
    check_tiles(shape, codes, scales, dtype, op);
    const auto call = [&](auto source) {
        source.codes = static_cast<const uint8_t*>(codes);
        source.scales = static_cast<const float*>(scales);
        source.columns = shape.columns;
        source.tiles_per_row = to_int(ceil_div(shape.columns, shape.tile), op, "columns");
        source.shift = exponent_of(shape.tile);
        source.fused = fused_rows(
            shape.rows, [&](int64_t rows) { return amax_chunks(rows, shape.columns); },
            [&](int64_t rows) { return ceil_div(rows, shape.tile); }, op);
        function(source);
    };
    dtype == BF16 ? call(TileSource<__nv_bfloat16>{}) : call(TileSource<float>{});
}

}  // namespace

void fp8_tile_amax(const void* codes, const void* scales, void* amax, const TileShape& shape, int dtype,
                   cudaStream_t stream) {
    constexpr const char* op = "fp8_tile_amax";
    with_source(codes, scales, shape, dtype, op,
                [&](const auto& source) { stored_amax(source, amax, op, stream); });
}

void fp8_tile_to_e4m3(const void* codes, const void* scales, const void* amax, void* copy, void* scale, bool transposed,
                      const TileShape& shape, int dtype, cudaStream_t stream) {
    constexpr const char* op = "fp8_tile_to_e4m3";
    with_source(codes, scales, shape, dtype, op,
                [&](const auto& source) { e4m3_copy(source, amax, {copy, scale, transposed}, op, stream); });
}

}  // namespace surogate
