// fp8_tile_quantize: code = E4M3(w / scale), scale = the largest magnitude of the tile / 448; 1 if that is 0.
//
// Each operation is rounded to fp32 separately, and codes are rounded to nearest even; magnitudes above 448 become 448.
// An element that is not finite makes the scale of its tile so, and all decoded elements of the tile NaN. All bits are
// those of `surogate_qlora_fp8.reference`, except the payloads of NaN.
//
//   w       fp32 or bf16 [R, K], aligned to 16 bytes
//   codes   e4m3 [R, K], aligned to 16 bytes
//   scales  fp32 [sum over matrices of ceil(rows / tile), ceil(K / tile)]
//
// K is a multiple of 8, tile is 64, 128 or 256; the last tiles of a matrix may be smaller. Grid: a block of 256 threads
// per tile, which reads the tile twice, the second time from the cache: 32 to 256 KiB.
//
// Bytes moved per element of bf16: 2 + 1; the floor for 4,096 x 12,288 at 4.26 TB/s is 35 us. About 15 instructions per
// element, most of them the division. It runs once, when a weight is loaded.
#include <surogate/reduce.cuh>

#include "tiles.cuh"

namespace surogate {
namespace {

constexpr const char* op = "fp8_tile_quantize";
constexpr int threads = 256;

// Returns two codes of w / scale, the first in the lower byte.
__device__ __forceinline__ uint32_t codes_of(float low, float high, float scale) {
    return __nv_cvt_float2_to_fp8x2(make_float2(__fdiv_rn(low, scale), __fdiv_rn(high, scale)), __NV_SATFINITE,
                                    __NV_E4M3);
}

template <class T>
__global__ void __launch_bounds__(threads)
    quantize_kernel(const T* __restrict__ w, uint2* __restrict__ codes, float* __restrict__ scales, int64_t columns,
                    int tile, const __grid_constant__ FusedRows fused) {
    __shared__ uint32_t scratch[32];
    const int tiles_per_row = static_cast<int>((columns + tile - 1) / tile);
    const FusedMatrix matrix = fused.of_chunk(blockIdx.x);
    const int64_t inside = blockIdx.x - matrix.first_chunk;  // tile of the matrix
    const int64_t first_row = matrix.first_row + inside / tiles_per_row * tile;
    const int64_t first_column = inside % tiles_per_row * tile;
    const int64_t rows_left = matrix.end_row - first_row, columns_left = columns - first_column;
    const int rows = static_cast<int>(rows_left < tile ? rows_left : tile);
    const int wide = static_cast<int>(columns_left < tile ? columns_left : tile) / octet;
    const auto octet_of = [&](int i) { return (first_row + i / wide) * (columns / octet) + first_column / octet + i % wide; };

    uint32_t top = 0;
    for (int i = threadIdx.x; i < rows * wide; i += threads) {
        const auto words = Words<T>::load(w, octet_of(i) * octet);
#pragma unroll
        for (int k = 0; k < octet; ++k) {
            top = max(top, __float_as_uint(words.get(k)) & 0x7fffffffu);  // NaN is above infinity
        }
    }
    const float amax = __uint_as_float(block_reduce(top, scratch, 0u, Max{}));
    const float exact = __fdiv_rn(amax, 448.0f);
    const float scale = exact == 0.0f ? 1.0f : exact;
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = scale;
    }
    for (int i = threadIdx.x; i < rows * wide; i += threads) {
        const auto words = Words<T>::load(w, octet_of(i) * octet);
        uint32_t bytes[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            bytes[k] = codes_of(words.get(4 * k), words.get(4 * k + 1), scale) |
                       codes_of(words.get(4 * k + 2), words.get(4 * k + 3), scale) << 16;
        }
        codes[octet_of(i)] = make_uint2(bytes[0], bytes[1]);
    }
}

template <class T>
void launch(const void* w, void* codes, void* scales, const TileShape& shape, cudaStream_t stream) {
    const int64_t tiles_per_row = ceil_div(shape.columns, shape.tile);
    const auto tiles = [&](int64_t rows) { return ceil_div(rows, shape.tile) * tiles_per_row; };
    const FusedRows fused = fused_rows(shape.rows, tiles, tiles, op);  // tiles are in the order of the scales
    quantize_kernel<T><<<fused.chunks(op), threads, 0, stream>>>(static_cast<const T*>(w), static_cast<uint2*>(codes),
                                                                 static_cast<float*>(scales), shape.columns, shape.tile,
                                                                 fused);
    check_launch(op);
}

}  // namespace

void fp8_tile_quantize(const void* w, void* codes, void* scales, const TileShape& shape, int dtype,
                       cudaStream_t stream) {
    check_tiles(shape, codes, scales, dtype, op);
    check_pointer(w, op, "w", 16);
    (dtype == BF16 ? launch<__nv_bfloat16> : launch<float>)(w, codes, scales, shape, stream);
}

}  // namespace surogate
