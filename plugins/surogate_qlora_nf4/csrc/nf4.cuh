// The levels of NF4, the blocks and groups of a fused param, and checks of arguments.
#pragma once

#include <surogate/check.h>
#include <surogate/dtype.h>

#include <surogate/fused_rows.cuh>
#include <surogate/table16.cuh>

#include "nf4.h"

namespace surogate {

// Quantiles of the normal distribution, as in bitsandbytes and `surogate_qlora_nf4.tables`.
__device__ constexpr float nf4_levels[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// Blocks whose absmax have a nested absmax.
constexpr int nf4_group = 256;

inline void check_shape(const Nf4Shape& shape, const char* op) {
    check_positive(shape.columns, op, "columns");
    SUROGATE_REQUIRE(shape.block == 64 || shape.block == 128 || shape.block == 256 || shape.block == 512, op,
                     "block must be 64, 128, 256 or 512, got " + std::to_string(shape.block));
    SUROGATE_REQUIRE(shape.columns % shape.block == 0, op,
                     "columns must be a multiple of " + std::to_string(shape.block) + ", got " +
                         std::to_string(shape.columns));
}

// Returns the matrices, where a matrix has a chunk for every `blocks_per_chunk` blocks.
inline FusedRows fused_blocks(const Nf4Shape& shape, int64_t blocks_per_chunk, const char* op) {
    const int64_t blocks_per_row = shape.columns / shape.block;
    return fused_rows(
        shape.rows, [&](int64_t rows) { return ceil_div(rows * blocks_per_row, blocks_per_chunk); },
        [&](int64_t rows) { return ceil_div(rows * blocks_per_row, nf4_group); }, op);
}

}  // namespace surogate
