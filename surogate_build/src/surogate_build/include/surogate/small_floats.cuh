// E4M3 and E2M1 in registers.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace surogate {

// Rounds to nearest even; magnitudes above 448 become 448, NaN becomes 0x7F.
__device__ __forceinline__ uint32_t e4m3_of(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

__device__ __forceinline__ float float_of_e4m3(uint32_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3)));
}

// Of a scale, which is neither negative nor NaN: four bits of exponent and three of mantissa, which are those of a float
// with a bias that is less by 120.
__device__ __forceinline__ float float_of_ue4m3(uint32_t code) { return __fmul_rn(__uint_as_float(code << 20), 0x1p120f); }

// Rounds to nearest even; magnitudes above 6 become 6, NaN becomes 7.
__device__ __forceinline__ uint32_t e2m1_of(float x) {
    const float a = fabsf(x);
    // Ties go to the even code. All comparisons with NaN are true.
    const uint32_t code = !(a <= 0.25f) + !(a < 0.75f) + !(a <= 1.25f) + !(a < 1.75f) + !(a <= 2.5f) + !(a < 3.5f) + !(a <= 5.0f);
    return x != x ? 7u : code | (__float_as_uint(x) >> 28 & 8u);
}

// Of the lower four bits.
__device__ __forceinline__ float float_of_e2m1(uint32_t code) {
    const uint32_t magnitude = code & 7u;
    const float level = magnitude < 2u ? 0.5f * static_cast<float>(magnitude)
                                       : __uint_as_float((126u + (magnitude >> 1)) << 23 | (magnitude & 1u) << 22);
    return code & 8u ? -level : level;
}

}  // namespace surogate
