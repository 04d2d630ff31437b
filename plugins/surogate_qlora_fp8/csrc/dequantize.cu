// fp8_tile_dequantize: out[r, k] = codes[r, k] * scale of its tile, rounded to bf16 or fp32.
//
// The product is rounded to fp32. So the result is bit-identical to that of
// `surogate_qlora_fp8.reference:fp8_tile_dequantize`.
//
//   codes   e4m3 [R, K], aligned to 16 bytes
//   scales  fp32 [sum over matrices of ceil(rows / tile), ceil(K / tile)]
//   out     bf16 or fp32 [R, K], aligned to 16 bytes
//
// K is a multiple of 8, tile is 64, 128 or 256; the last tiles of a matrix may be smaller. A thread has eight columns of
// four rows, which are in one tile, and issues their loads first. Consecutive threads have consecutive octets of a row,
// so a warp reads 256 bytes and writes 512 bytes (bf16) per instruction. Grid: a block of 256 threads per 8,192 elements
// of a matrix.
//
// Bytes moved per element, bf16: 1 of codes, 2 written. 4,096 x 12,288: 151.0 MB, a floor of 35.4 us at 4.26 TB/s.
// Instructions per element, counted in the code for SM90: 7.4. An SM issues 128 per clock, so at 1.5 GHz these take
// 14.7 us. Expected: at least 85 % of bandwidth.
#include "tiles.cuh"

namespace surogate {
namespace {

constexpr const char* op = "fp8_tile_dequantize";
constexpr int threads = 256;
constexpr int height = 4;  // rows of a thread

template <class T>
__global__ void __launch_bounds__(threads)
    dequantize_kernel(const uint2* __restrict__ codes, const float* __restrict__ scales, T* __restrict__ out,
                      uint32_t octets_per_row, uint32_t tiles_per_row, int shift,
                      const __grid_constant__ FusedRows fused) {
    const FusedMatrix matrix = fused.of_chunk(blockIdx.x);
    const int64_t rows = matrix.end_row - matrix.first_row;
    const uint32_t place = static_cast<uint32_t>(blockIdx.x - matrix.first_chunk) * threads + threadIdx.x;
    const uint32_t band = place / octets_per_row, column = place % octets_per_row;
    const int64_t row = static_cast<int64_t>(band) * height;
    if (row >= rows) {
        return;
    }
    const int64_t first = (matrix.first_row + row) * octets_per_row + column;
    const int64_t tile_row = matrix.first_scale + (row >> shift);
    const float scale = __ldg(scales + tile_row * tiles_per_row + (column * octet >> shift));
    const int count = static_cast<int>(rows - row < height ? rows - row : height);
    uint2 words[height];
#pragma unroll
    for (int i = 0; i < height; ++i) {
        // Read once per pass: the cache is for `out`, which products read next.
        words[i] = __ldcs(codes + first + static_cast<int64_t>(i < count ? i : 0) * octets_per_row);
    }
#pragma unroll
    for (int i = 0; i < height; ++i) {
        float x[octet];
#pragma unroll
        for (int k = 0; k < octet; k += 2) {
            const float2 pair = floats_of_e4m3((k < 4 ? words[i].x : words[i].y) >> (k % 4 ? 16 : 0) & 0xffffu);
            x[k] = __fmul_rn(pair.x, scale);
            x[k + 1] = __fmul_rn(pair.y, scale);
        }
        if (i < count) {
            store_whole(out + (first + static_cast<int64_t>(i) * octets_per_row) * octet, Words<T>::nearest(x));
        }
    }
}

template <class T>
void launch(const void* codes, const void* scales, void* out, const TileShape& shape, cudaStream_t stream) {
    const int64_t octets_per_row = shape.columns / octet;
    const FusedRows fused = fused_rows(
        shape.rows, [&](int64_t rows) { return ceil_div(ceil_div(rows, height) * octets_per_row, threads); },
        [&](int64_t rows) { return ceil_div(rows, shape.tile); }, op);
    dequantize_kernel<T><<<fused.chunks(op), threads, 0, stream>>>(
        static_cast<const uint2*>(codes), static_cast<const float*>(scales), static_cast<T*>(out),
        static_cast<uint32_t>(to_int(octets_per_row, op, "columns")),
        static_cast<uint32_t>(ceil_div(shape.columns, shape.tile)), exponent_of(shape.tile), fused);
    check_launch(op);
}

}  // namespace

void fp8_tile_dequantize(const void* codes, const void* scales, void* out, const TileShape& shape, int dtype,
                         cudaStream_t stream) {
    check_tiles(shape, codes, scales, dtype, op);
    check_pointer(out, op, "out", 16);
    (dtype == BF16 ? launch<__nv_bfloat16> : launch<float>)(codes, scales, out, shape, stream);
}

}  // namespace surogate
