// nf4_dequantize: out[i] = level[code[i]] * absmax[i / block], rounded to bf16 or fp32.
//
// With double quantization, absmax[b] = map[absmax_code[b]] * nested[b / 256] + offset, where b / 256 counts within a
// logical matrix, and `offset` is one number per matrix. Each operation is rounded to fp32 separately. So the result is
// bit-identical to that of `surogate_qlora_nf4.reference:nf4_dequantize`, and to `dequantize_4bit` of bitsandbytes for
// each matrix by itself.
//
//   codes    uint8 [R * K / 2], row by row, the first element of a byte in its upper half; aligned to 16 bytes
//   absmax   fp32 [R * K / block], or uint8 with `nested`
//   nested   fp32, ceil(rows * K / block / 256) per matrix; null: absmax is fp32
//   offset   fp32 [matrices]
//   map      fp32 [256], the 8-bit map
//   out      bf16 or fp32 [R, K], aligned to 16 bytes
//
// K is a multiple of `block`: 64, 128, 256 or 512. Grid: a block of 256 threads per 8,192 elements of a matrix. A thread
// decodes four times eight codes, whose loads it issues first. Consecutive threads have consecutive octets, so a warp
// reads 128 bytes and writes 512 bytes (bf16) per instruction. These 8,192 elements have one nested absmax.
//
// Bytes moved per element, bf16, block 64: 0.5 of codes, 0.0625 of absmax (0.0157 with double quantization), 2 written.
// 4,096 x 12,288: 129.0 MB and 126.6 MB, floors of 30.3 and 29.7 us at 4.26 TB/s. Instructions per element, counted in
// the code for SM90: 6.2 and 7.4, of which 1 is a shuffle. An SM issues 128 per clock and shuffles 32 times, so at
// 1.5 GHz all take 12.3 and 14.7 us, the shuffles 7.9 us. Expected: at least 85 % of bandwidth.
#include "nf4.cuh"

namespace surogate {
namespace {

constexpr const char* op = "nf4_dequantize";

// The scales of a chunk. There are 1 << shift octets in a block.
struct Absmax {
    using Loaded = float;

    const float* __restrict__ absmax;
    int shift;

    __device__ __forceinline__ float load(uint32_t i) const { return __ldca(absmax + (i >> shift)); }
    __device__ __forceinline__ void apply(float absmax, float (&x)[octet]) const {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = __fmul_rn(x[i], absmax);
        }
    }
};

struct NestedAbsmax {
    using Loaded = float;

    const uint8_t* __restrict__ codes;
    const float* __restrict__ map;
    float nested;
    float offset;
    int shift;

    __device__ __forceinline__ float load(uint32_t i) const { return __ldca(map + __ldca(codes + (i >> shift))); }
    __device__ __forceinline__ void apply(float level, float (&x)[octet]) const {
        const float absmax = __fadd_rn(__fmul_rn(level, nested), offset);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = __fmul_rn(x[i], absmax);
        }
    }
};

template <class T, bool Double>
__global__ void __launch_bounds__(decode_threads)
    dequantize_kernel(const uint32_t* __restrict__ codes, const void* __restrict__ absmax,
                      const float* __restrict__ nested, const float* __restrict__ offset,
                      const float* __restrict__ map, T* __restrict__ out, int64_t octets_per_row, int shift,
                      const __grid_constant__ FusedRows fused) {
    const Table16 table(nf4_levels);
    const FusedMatrix matrix = fused.of_chunk(blockIdx.x);
    const int64_t inside = (blockIdx.x - matrix.first_chunk) * chunk_octets;
    const int64_t first = matrix.first_row * octets_per_row + inside;
    const int64_t count = matrix.end_row * octets_per_row - first;
    const int64_t block = first >> shift;
    if constexpr (Double) {
        const int64_t group = matrix.first_scale + (inside >> shift) / nf4_group;
        const NestedAbsmax scale{static_cast<const uint8_t*>(absmax) + block, map, nested[group], offset[matrix.index], shift};
        decode_chunk<true>(table, codes + first, out + first * octet, count, scale);
    } else {
        const Absmax scale{static_cast<const float*>(absmax) + block, shift};
        decode_chunk<true>(table, codes + first, out + first * octet, count, scale);
    }
}
static_assert(nf4_group * 64 % (chunk_octets * octet) == 0, "a chunk has one nested absmax");

template <class T, bool Double>
void launch(const void* codes, const Nf4Scales& scales, void* out, const Nf4Shape& shape, cudaStream_t stream) {
    const FusedRows fused = fused_blocks(shape, chunk_octets * octet / shape.block, op);
    dequantize_kernel<T, Double><<<fused.chunks(op), decode_threads, 0, stream>>>(
        static_cast<const uint32_t*>(codes), scales.absmax, static_cast<const float*>(scales.nested),
        static_cast<const float*>(scales.offset), static_cast<const float*>(scales.map), static_cast<T*>(out),
        shape.columns / octet, exponent_of(shape.block / octet), fused);
    check_launch(op);
}

}  // namespace

void nf4_dequantize(const void* codes, const Nf4Scales& scales, void* out, const Nf4Shape& shape, int dtype,
                    cudaStream_t stream) {
    check_shape(shape, op);
    check_pointer(codes, op, "codes", 16);
    check_pointer(scales.absmax, op, "absmax");
    check_pointer(out, op, "out", 16);
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, "out must be fp32 or bf16");
    if (scales.nested == nullptr) {
        (dtype == BF16 ? launch<__nv_bfloat16, false> : launch<float, false>)(codes, scales, out, shape, stream);
    } else {
        check_pointer(scales.offset, op, "offset");
        check_pointer(scales.map, op, "map");
        (dtype == BF16 ? launch<__nv_bfloat16, true> : launch<float, true>)(codes, scales, out, shape, stream);
    }
}

}  // namespace surogate
