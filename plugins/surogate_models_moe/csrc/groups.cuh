// Groups of rows, one for each expert, cut into tiles that have rows of one group.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace surogate {

// The tiles of expert e are those from the rows before it / side + e on. Between them and those of the next one may be a tile
// without rows.
inline int64_t tiles_of_groups(int64_t rows, int64_t side, int64_t experts) { return rows / side + experts; }

// The group of a tile of `Side` rows: its expert; its rows from `start` on; the tile in it, which may be past its rows.
struct Group {
    int expert, start, rows, tile;
};

// The row at which the rows of an expert begin.
__device__ __forceinline__ int start_of(const int32_t* ends, int expert) { return expert > 0 ? ends[expert - 1] : 0; }

// Called by all threads of a block. Of the experts from `begin` on, which are counted from 0: a tile in front of their rows
// has none.
template <int Side>
__device__ __forceinline__ Group group_of(const int32_t* ends, int experts, int tile, int begin = 0) {
    int expert = -1;  // the last one whose first tile is not behind this one
    for (int first = 0; first < experts; first += static_cast<int>(blockDim.x)) {
        const int e = first + static_cast<int>(threadIdx.x);
        const int start = e < experts ? start_of(ends, begin + e) : 0;
        expert += __syncthreads_count(e < experts && start / Side + e <= tile);
    }
    if (expert < 0) {
        return {0, 0, 0, 0};
    }
    const int start = start_of(ends, begin + expert);
    return {expert, start, ends[begin + expert] - start, tile - (start / Side + expert)};
}

}  // namespace surogate
