// What follows from a GemmShape: defaults and checks, the layout of its workspace, its description.
//
// Workspace: cuBLASLt's | fp32 product, if it is staged | fp32 bias, if it is widened. Each part begins at a multiple
// of 256 bytes.
#pragma once

#include <cstdint>
#include <string>

#include "gemm.h"

namespace surogate {

// Returns the shape with its default row strides. Throws std::invalid_argument if it is not supported.
GemmShape checked(GemmShape shape);

int64_t stored_a(const GemmShape& shape);  // elements per stored row
int64_t stored_b(const GemmShape& shape);

int64_t stored_rows_a(const GemmShape& shape);
int64_t stored_rows_b(const GemmShape& shape);

// Returns whether the product is computed in fp32 in the workspace and then cast: cuBLASLt cannot write bf16 for fp32
// operands.
bool is_staged(const GemmShape& shape);
bool is_bias_widened(const GemmShape& shape);
int product_dtype(const GemmShape& shape);  // of what cuBLASLt writes

int64_t staged_bytes(const GemmShape& shape);
int64_t bias_bytes(const GemmShape& shape);

// Returns sizes, dtypes, strides, alignments and workspace in one line: what the choice of an algorithm depends on.
std::string describe_shape(const GemmShape& shape);

}  // namespace surogate
