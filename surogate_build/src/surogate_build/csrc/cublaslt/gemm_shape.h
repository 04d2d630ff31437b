// What follows from a GemmShape: defaults and checks, its description.
#pragma once

#include <cstdint>
#include <string>

#include "surogate/gemm.h"

namespace surogate {

// Returns the shape with its default row strides. Throws std::invalid_argument if it is not supported.
GemmShape checked(GemmShape shape);

int64_t stored_a(const GemmShape& shape);  // elements per stored row
int64_t stored_b(const GemmShape& shape);

int64_t stored_rows_a(const GemmShape& shape);
int64_t stored_rows_b(const GemmShape& shape);

// Returns the elements of a row that share a scale, 0 if the scales are not those of blocks.
int64_t block_of(const GemmShape& shape);

// Returns the bytes of the block scales of a matrix of `rows` rows.
int64_t scale_bytes(const GemmShape& shape, int64_t rows);

// Returns sizes, dtypes, strides, alignments and workspace in one line: what the choice of an algorithm depends on.
std::string describe_shape(const GemmShape& shape);

}  // namespace surogate
