// The scales of MXFP4. <surogate/e2m1_weight.cuh> has what is stored.
#pragma once

#include <surogate/e2m1_weight.cuh>

#include "mxfp4.h"

namespace surogate {

// Elements of a row that share a scale.
constexpr int mxfp4_block = 32;

// Returns 2^(code - 127); NaN for 255. The code 0 is no normal number.
__device__ __forceinline__ float float_of_e8m0(uint32_t code) {
    return __uint_as_float(code == 255u ? 0x7fc00000u : code == 0u ? 0x00400000u : code << 23);
}

struct Mxfp4Scale {
    static constexpr int block = mxfp4_block;
    static constexpr bool is_global = false;
    static __device__ __forceinline__ float of(uint32_t code) { return float_of_e8m0(code); }
};

inline E2m1Weight stored(const Mxfp4Weight& weight, const Mxfp4Shape& shape, int dtype) {
    return {weight.codes, weight.scales, nullptr, shape.rows, shape.columns, dtype};
}

}  // namespace surogate
