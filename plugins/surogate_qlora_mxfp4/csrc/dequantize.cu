// mxfp4_dequantize: out[i] = level[code[i]] * 2^(scale[i / 32] - 127), in bf16 or fp32.
//
// The product is exact in fp32, and in bf16 for the scales 2 to 252: the bits are those of
// `surogate_qlora_mxfp4.reference:mxfp4_dequantize`.
//
//   codes   uint8 [R, K / 2], E2M1, the first element of a byte in its lower half; aligned to 16 bytes
//   scales  uint8 [R, K / 32], E8M0
//   out     bf16 or fp32 [R, K], aligned to 16 bytes
//
// K is a multiple of 32. Grid: a block of 256 threads per 8,192 elements of a matrix. A thread decodes four times eight
// codes, whose loads it issues first. Consecutive threads have consecutive octets, so a warp reads 128 bytes and writes
// 512 bytes (bf16) per instruction.
//
// Bytes moved per element, bf16: 0.5 of codes, 0.03125 of scales, 2 written. The experts of a layer of gpt-oss 20B, 796 M
// weights: 2.0 GB, a floor of 473 us at 4.26 TB/s. Expected: at least 85 % of bandwidth, as NVFP4's, which does more.
#include "mxfp4.cuh"

namespace surogate {
namespace {

constexpr const char* op = "mxfp4_dequantize";

// The scales of a chunk.
struct Scales {
    using Loaded = unsigned char;

    const unsigned char* __restrict__ scales;

    __device__ __forceinline__ Loaded load(uint32_t i) const { return __ldca(scales + i * octet / mxfp4_block); }
    __device__ __forceinline__ void apply(Loaded code, float (&x)[octet]) const {
        const float scale = float_of_e8m0(code);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = __fmul_rn(x[i], scale);
        }
    }
};

template <class T>
__global__ void __launch_bounds__(decode_threads)
    dequantize_kernel(const uint32_t* __restrict__ codes, const unsigned char* __restrict__ scales, T* __restrict__ out,
                      int64_t octets_per_row, const __grid_constant__ FusedRows fused) {
    const Table16 table(e2m1_levels);
    const int matrix = fused.matrix_of(blockIdx.x);
    const int64_t inside = (blockIdx.x - fused.first_chunk[matrix]) * chunk_octets;
    const int64_t first = fused.first_row[matrix] * octets_per_row + inside;
    const int64_t count = fused.first_row[matrix + 1] * octets_per_row - first;
    decode_chunk<false>(table, codes + first, out + first * octet, count, Scales{scales + first * octet / mxfp4_block});
}

template <class T>
void launch(const Mxfp4Weight& weight, void* out, const Mxfp4Shape& shape, cudaStream_t stream) {
    const FusedRows fused = fused_elements(shape, chunk_octets * octet, op);
    dequantize_kernel<T><<<fused.chunks(op), decode_threads, 0, stream>>>(
        static_cast<const uint32_t*>(weight.codes), static_cast<const unsigned char*>(weight.scales),
        static_cast<T*>(out), shape.columns / octet, fused);
    check_launch(op);
}

}  // namespace

void mxfp4_dequantize(const Mxfp4Weight& weight, void* out, const Mxfp4Shape& shape, int dtype, cudaStream_t stream) {
    check_weight(weight, shape.columns, dtype, op);
    check_pointer(out, op, "out", 16);
    (dtype == BF16 ? launch<__nv_bfloat16> : launch<float>)(weight, out, shape, stream);
}

}  // namespace surogate
