// fp4_block_dequantize: out[i] = level[code[i]] * scale[i / 16] * global_scale[matrix], rounded to bf16 or fp32.
//
// The first product is exact, the second is rounded to fp32. So the result is bit-identical to that of
// `surogate_qlora_fp4.reference:fp4_block_dequantize`.
//
//   codes          uint8 [R, K / 2], E2M1, the first element of a byte in its lower half; aligned to 16 bytes
//   scales         e4m3 [R, K / 16]
//   global_scales  fp32 [matrices]
//   out            bf16 or fp32 [R, K], aligned to 16 bytes
//
// K is a multiple of 16. Grid: a block of 256 threads per 8,192 elements of a matrix. A thread decodes four times eight
// codes, whose loads it issues first. Consecutive threads have consecutive octets, so a warp reads 128 bytes and writes
// 512 bytes (bf16) per instruction.
//
// Bytes moved per element, bf16: 0.5 of codes, 0.0625 of scales, 2 written. 4,096 x 12,288: 129.0 MB, a floor of 30.3 us
// at 4.26 TB/s. Instructions per element, counted in the code for SM90: 7.5, of which 1 is a shuffle. An SM issues 128 per
// clock and shuffles 32 times, so at 1.5 GHz all take 14.9 us, the shuffles 7.9 us. Expected: at least 85 % of bandwidth.
#include "fp4.cuh"

namespace surogate {
namespace {

constexpr const char* op = "fp4_block_dequantize";

// The scales of a chunk.
struct Scales {
    using Loaded = unsigned char;

    const unsigned char* __restrict__ scales;
    float global_scale;

    __device__ __forceinline__ Loaded load(uint32_t i) const { return __ldca(scales + i * octet / fp4_block); }
    __device__ __forceinline__ void apply(Loaded code, float (&x)[octet]) const {
        const float scale = float_of_e4m3(code);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = __fmul_rn(__fmul_rn(x[i], scale), global_scale);
        }
    }
};

template <class T>
__global__ void __launch_bounds__(decode_threads)
    dequantize_kernel(const uint32_t* __restrict__ codes, const unsigned char* __restrict__ scales,
                      const float* __restrict__ global_scales, T* __restrict__ out, int64_t octets_per_row,
                      const __grid_constant__ FusedRows fused) {
    const Table16 table(e2m1_levels);
    const int matrix = fused.matrix_of(blockIdx.x);
    const int64_t inside = (blockIdx.x - fused.first_chunk[matrix]) * chunk_octets;
    const int64_t first = fused.first_row[matrix] * octets_per_row + inside;
    const int64_t count = fused.first_row[matrix + 1] * octets_per_row - first;
    const Scales own{scales + first * octet / fp4_block, global_scales[matrix]};
    decode_chunk<false>(table, codes + first, out + first * octet, count, own);
}

template <class T>
void launch(const Fp4Weight& weight, void* out, const Fp4Shape& shape, cudaStream_t stream) {
    const FusedRows fused = fused_elements(shape, chunk_octets * octet, op);
    dequantize_kernel<T><<<fused.chunks(op), decode_threads, 0, stream>>>(
        static_cast<const uint32_t*>(weight.codes), static_cast<const unsigned char*>(weight.scales),
        static_cast<const float*>(weight.global_scales), static_cast<T*>(out), shape.columns / octet, fused);
    check_launch(op);
}

}  // namespace

void fp4_block_dequantize(const Fp4Weight& weight, void* out, const Fp4Shape& shape, int dtype, cudaStream_t stream) {
    check_weight(weight, shape, dtype, op);
    check_pointer(out, op, "out", 16);
    (dtype == BF16 ? launch<__nv_bfloat16> : launch<float>)(weight, out, shape, stream);
}

}  // namespace surogate
