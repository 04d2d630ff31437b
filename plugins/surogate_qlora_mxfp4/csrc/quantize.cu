// mxfp4_quantize: w to MXFP4, in blocks of 32 elements of a row, by the rule of the OCP Microscaling Formats 1.0.
//
//   scale = floor(log2(max |block|)) - 2 + 127, kept to 2 to 252; 0 for a block of zeros, 255 for one that is not finite
//   code  = E2M1(w * 2^(127 - scale)), to nearest even; magnitudes above 6 become 6, a NaN has the code 7
//
// The exponent of a number is read from its bits; that of a number below the normal ones is too small for any scale. The
// product is exact. All bits are those of `surogate_qlora_mxfp4.reference:mxfp4_quantize`.
//
//   w       fp32 or bf16 [R, K], aligned to 16 bytes; K is a multiple of 32
//   codes   uint8 [R, K / 2], the first element of a byte in its lower half, aligned to 16 bytes
//   scales  uint8 [R, K / 32]
//
// A thread has a block of 32 elements. Bytes moved per element of bf16: 2 read, 0.53 written. It runs once, when a weight is
// loaded.
#include <algorithm>

#include <surogate/small_floats.cuh>
#include <surogate/words.cuh>

#include "mxfp4.cuh"

namespace surogate {
namespace {

constexpr const char* op = "mxfp4_quantize";
constexpr int threads = 128;
constexpr uint32_t infinity = 0x7f800000u;

// Returns the scale of a block by the bits of its largest magnitude. NaN is above infinity.
__device__ __forceinline__ uint32_t scale_of(uint32_t top) {
    if (top == 0u) {
        return 0u;
    }
    return top >= infinity ? 255u : static_cast<uint32_t>(min(max(static_cast<int>(top >> 23) - 2, 2), 252));
}

template <class T>
__global__ void __launch_bounds__(threads)
    quantize_kernel(const T* __restrict__ w, uint4* __restrict__ codes, uint8_t* __restrict__ scales, int64_t blocks) {
    const int64_t block = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (block >= blocks) {
        return;
    }
    float x[mxfp4_block];
    uint32_t top = 0;
#pragma unroll
    for (int part = 0; part < mxfp4_block / octet; ++part) {
        const auto words = Words<T>::load(w, block * mxfp4_block + part * octet);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            const float element = words.get(i);
            x[part * octet + i] = element;
            top = max(top, __float_as_uint(element) & 0x7fffffffu);
        }
    }
    const uint32_t scale = scale_of(top);
    const float inverse = float_of_e8m0(scale > 254u ? 0u : 254u - scale);
    uint32_t packed[4] = {};
#pragma unroll
    for (int i = 0; i < mxfp4_block; ++i) {
        packed[i / octet] |= e2m1_of(__fmul_rn(x[i], inverse)) << 4 * (i % octet);
    }
    codes[block] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    scales[block] = static_cast<uint8_t>(scale);
}

template <class T>
void launch(const void* w, const Mxfp4Weight& weight, int64_t blocks, cudaStream_t stream) {
    const int grid = to_int(ceil_div(blocks, threads), op, "the grid");
    quantize_kernel<T><<<grid, threads, 0, stream>>>(static_cast<const T*>(w), static_cast<uint4*>(weight.codes),
                                                     static_cast<uint8_t*>(weight.scales), blocks);
    check_launch(op);
}

}  // namespace

void mxfp4_quantize(const void* w, void* codes, void* scales, int64_t rows, int64_t columns, int dtype,
                    cudaStream_t stream) {
    const Mxfp4Weight weight{codes, scales};
    check_weight<Mxfp4Scale>(stored(weight, {{rows}, columns}, dtype), op);
    check_positive(rows, op, "rows");
    check_pointer(w, op, "w", 16);
    (dtype == BF16 ? launch<__nv_bfloat16> : launch<float>)(w, weight, rows * (columns / mxfp4_block), stream);
}

}  // namespace surogate
