// The levels of E2M1, and checks of arguments.
#pragma once

#include <surogate/check.h>
#include <surogate/dtype.h>

#include <surogate/fused_rows.cuh>
#include <surogate/small_floats.cuh>
#include <surogate/table16.cuh>

#include "fp4.h"

namespace surogate {

// By code: the sign is the upper bit.
__device__ constexpr float e2m1_levels[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Elements of a row that share a scale.
constexpr int fp4_block = 16;

inline void check_weight(const Fp4Weight& weight, const Fp4Shape& shape, int dtype, const char* op) {
    check_positive(shape.columns, op, "columns");
    SUROGATE_REQUIRE(shape.columns % fp4_block == 0, op,
                     "columns must be a multiple of 16, got " + std::to_string(shape.columns));
    check_pointer(weight.codes, op, "codes", 16);
    check_pointer(weight.scales, op, "scales");
    check_pointer(weight.global_scales, op, "global_scales", 4);
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, "the weight must be fp32 or bf16");
}

// Returns the matrices, where a matrix has a chunk for every `elements` elements.
inline FusedRows fused_elements(const Fp4Shape& shape, int64_t elements, const char* op) {
    return fused_rows(
        shape.rows, [&](int64_t rows) { return ceil_div(rows * shape.columns, elements); },
        [](int64_t) { return int64_t{1}; }, op);
}

}  // namespace surogate
