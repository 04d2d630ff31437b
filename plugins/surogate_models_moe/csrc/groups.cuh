// Groups of rows, one for each expert, cut into tiles that have rows of one group.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "surogate/reduce.cuh"

namespace surogate {

// As many tiles of `side` rows as groups can have, whatever the routes are.
inline int64_t tiles_of_groups(int64_t rows, int64_t side, int64_t experts) {
    return rows / side + (experts < rows ? experts : rows);
}

// The group of a tile of `Side` rows: its expert, -1 if no expert has the tile; its rows from `start` on; the tile in it.
struct Group {
    int expert, start, rows, tile;
};

template <int Side>
__device__ __forceinline__ Group group_of(const int32_t* ends, int experts, int tile) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    int before = 0;  // tiles of the experts before these 32
    for (int first = 0; first < experts; first += 32) {
        const int e = first + lane;
        const int start = e > 0 && e < experts ? ends[e - 1] : 0, end = e < experts ? ends[e] : start;
        const int own = (end - start + Side - 1) / Side;
        int through = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_sync(full_warp, through, lane >= distance ? lane - distance : 0);
            through += lane >= distance ? other : 0;
        }
        const unsigned behind = __ballot_sync(full_warp, tile < before + through);
        if (behind != 0) {
            const int found = __ffs(behind) - 1;
            const int at = before + through - own;
            return {first + found, __shfl_sync(full_warp, start, found), __shfl_sync(full_warp, end - start, found),
                    tile - __shfl_sync(full_warp, at, found)};
        }
        before += __shfl_sync(full_warp, through, 31);
    }
    return {-1, 0, 0, 0};
}

}  // namespace surogate
