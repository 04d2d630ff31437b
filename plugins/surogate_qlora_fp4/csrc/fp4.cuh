// The scales of NVFP4. <surogate/e2m1_weight.cuh> has what is stored.
#pragma once

#include <surogate/e2m1_weight.cuh>
#include <surogate/small_floats.cuh>

#include "fp4.h"

namespace surogate {

// Elements of a row that share a scale.
constexpr int fp4_block = 16;

struct Fp4Scale {
    static constexpr int block = fp4_block;
    static constexpr bool is_global = true;
    static __device__ __forceinline__ float of(uint32_t code) { return float_of_e4m3(code); }
};

inline E2m1Weight stored(const Fp4Weight& weight, const Fp4Shape& shape, int dtype) {
    return {weight.codes, weight.scales, weight.global_scales, shape.rows, shape.columns, dtype};
}

}  // namespace surogate
