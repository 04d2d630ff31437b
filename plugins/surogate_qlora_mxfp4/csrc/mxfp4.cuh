// The levels of E2M1, the powers of E8M0, and checks of arguments.
#pragma once

#include <surogate/check.h>
#include <surogate/dtype.h>

#include <surogate/fused_rows.cuh>
#include <surogate/table16.cuh>

#include "mxfp4.h"

namespace surogate {

// By code: the sign is the upper bit.
__device__ constexpr float e2m1_levels[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Elements of a row that share a scale.
constexpr int mxfp4_block = 32;

// Returns 2^(code - 127); NaN for 255. The code 0 is no normal number.
__device__ __forceinline__ float float_of_e8m0(uint32_t code) {
    return __uint_as_float(code == 255u ? 0x7fc00000u : code == 0u ? 0x00400000u : code << 23);
}

inline void check_weight(const Mxfp4Weight& weight, int64_t columns, int dtype, const char* op) {
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(columns % mxfp4_block == 0, op, "columns must be a multiple of 32, got " + std::to_string(columns));
    check_pointer(weight.codes, op, "codes", 16);
    check_pointer(weight.scales, op, "scales");
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, "the weight must be fp32 or bf16");
}

// Returns the matrices, where a matrix has a chunk for every `elements` elements.
inline FusedRows fused_elements(const Mxfp4Shape& shape, int64_t elements, const char* op) {
    return fused_rows(
        shape.rows, [&](int64_t rows) { return ceil_div(rows * shape.columns, elements); },
        [](int64_t) { return int64_t{1}; }, op);
}

}  // namespace surogate
