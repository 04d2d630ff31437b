// Conversion to FP8, and scales in kernels.
//
//   q = round(float(x) * encode) to nearest even, saturated: values above the largest one and infinities become the
//   largest one, NaN becomes 0x7F. Uses the instructions of SM89 and newer; other targets emulate them.
#pragma once

#include <cuda_fp8.h>
#include <surogate/dtype.h>
#include <surogate/quantize_tile.cuh>

#include <cfloat>

#include "scale.h"

namespace surogate {

using Octet = Packed<__nv_bfloat16, 8>;

template <int Format>
constexpr float fp8_max = Format == E4M3 ? 448.0f : 57344.0f;

template <int Format>
__device__ __forceinline__ uint32_t quantize_pair(float low, float high, float encode) {
    return __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(low, encode), __fmul_rn(high, encode)), __NV_SATFINITE,
                                    Format == E4M3 ? __NV_E4M3 : __NV_E5M2);
}

// Quantizes eight values into two words, the first value in the lowest byte.
template <int Format>
__device__ __forceinline__ void quantize(const float (&x)[8], float encode, uint32_t (&bytes)[2]) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        bytes[k] = quantize_pair<Format>(x[4 * k], x[4 * k + 1], encode) |
                   quantize_pair<Format>(x[4 * k + 2], x[4 * k + 3], encode) << 16;
    }
}

// Returns the encode factor of a tensor with this amax, for a format whose largest value is `maximum`.
__device__ __forceinline__ float encode_of_amax(float amax, float maximum) {
    return amax == 0 ? 1.0f : fminf(__fdiv_rn(maximum, amax), FLT_MAX);
}

// Returns whether a launch that measures is needed.
__device__ __forceinline__ bool is_initialised(const float* scale) { return scale != nullptr && scale[1] != 0; }

// Returns the encode factor to use.
template <int Format>
__device__ __forceinline__ float encode_of(const Scale& scale) {
    if (scale.scaling == kCurrent || (scale.scaling == kFallback && !is_initialised(scale.given))) {
        return encode_of_amax(scale.measured[0], fp8_max<Format>);
    }
    const float encode = scale.given[1];
    return encode == 0 ? 1.0f : encode;
}

// Writes the scale that was used, and raises amax by the measured one. One thread of the grid calls it. If the measured
// tensor was not finite, decode is NaN: infinities saturate, and products that read them must not look finite.
__device__ __forceinline__ void publish(const Scale& scale, float encode) {
    if (scale.out == nullptr) {
        return;
    }
    const bool copied = scale.scaling == kFallback && is_initialised(scale.given);
    const float decode = scale.measured[1] != 0 ? __int_as_float(0x7fc00000) : __fdiv_rn(1.0f, encode);
    scale.out[0] = copied ? scale.given[0] : decode;
    scale.out[1] = encode;
    if (scale.scaling == kCurrent && scale.amax != nullptr) {
        AbsMax::raise(scale.amax, scale.measured[0], scale.measured[1] != 0);
    }
}

}  // namespace surogate
