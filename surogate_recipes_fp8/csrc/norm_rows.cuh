// What the kernels of RMS norms share: groups of threads that have one row each, and a tile of rows whose bytes are
// written transposed.
//
// A block has `tile_rows` consecutive rows, 32 or 16. A group of threads keeps a row in registers, as the bf16 kernels do
// (rmsnorm.cu, rmsnorm_bwd.cu of surogate-recipe-bf16), and quantizes it from there: the scale is known before. The bytes
// of the rows are collected in shared memory, so that nothing is read twice. Then the block writes their transpose: 32
// bytes, a whole sector, per column. With 16 rows, for more columns than fit in shared memory otherwise, two blocks share
// a sector, which L2 merges.
#pragma once

#include <surogate/check.h>
#include <surogate/reduce.cuh>

#include "fp8.cuh"

namespace surogate {

constexpr int64_t kMultiprocessors = 132;  // of an H200. Constant, because sums depend on the size of blocks.

// Returns the number of warps of a block in which each has a row.
constexpr int row_warps(int64_t blocks) { return blocks <= 2 * kMultiprocessors ? 16 : 8; }

// The threads of a block that have one row: a warp if WarpRow, otherwise `lanes` threads, a multiple of 32.
template <bool WarpRow>
struct RowGroup {
    int lanes, index, count, lane;

    __device__ __forceinline__ explicit RowGroup(int lanes_)
        : lanes(WarpRow ? 32 : lanes_),
          index(static_cast<int>(threadIdx.x) / lanes),
          count(static_cast<int>(blockDim.x) / lanes),
          lane(static_cast<int>(threadIdx.x) % lanes) {}
};

// Sums over a group, the same on each of its threads. Two halves of the scratch memory are used in turn, so that one
// barrier per row suffices.
template <bool WarpRow>
class RowSums {
public:
    // Scratch memory of a block: a word for each of its warps, twice.
    using Scratch = float[2][32];

    __device__ __forceinline__ RowSums(Scratch& scratch, const RowGroup<WarpRow>& group)
        : scratch_(scratch), group_(group) {}

    // The sums of the warps are added in the order of `block_sum`.
    __device__ __forceinline__ float tree(float value) {
        value = warp_sum(value);
        if constexpr (!WarpRow) {
            const float* sums = exchange(value);
            const int lane = group_.lane % 32;
            value = warp_sum(lane < group_.lanes / 32 ? sums[lane] : 0.0f);
        }
        return value;
    }

    // The sums of the warps are added from the first to the last.
    __device__ __forceinline__ float in_order(float value) {
        value = warp_sum(value);
        if constexpr (!WarpRow) {
            const float* sums = exchange(value);
            value = sums[0];
            for (int warp = 1; warp < group_.lanes / 32; ++warp) {
                value += sums[warp];
            }
        }
        return value;
    }

private:
    __device__ __forceinline__ const float* exchange(float value) {
        float* sums = scratch_[half_] + group_.index * (group_.lanes / 32);
        if (group_.lane % 32 == 0) {
            sums[group_.lane / 32] = value;
        }
        asm volatile("bar.sync %0, %1;" ::"r"(group_.index + 1), "r"(group_.lanes) : "memory");
        half_ = !half_;
        return sums;
    }

    Scratch& scratch_;
    const RowGroup<WarpRow>& group_;
    bool half_ = false;
};

// The bytes of the rows of a block in shared memory, row by row. Rows from 16 on begin 64 bytes later, so that the threads
// that read both halves of a column at once do not meet in a bank.
struct RowTile {
    uint8_t* bytes;
    int columns;

    static constexpr int64_t size(int64_t rows, int64_t columns) { return rows * columns + (rows > 16 ? 64 : 0); }

    __device__ __forceinline__ uint8_t* at(int row, int column) const {
        return bytes + row * columns + (row >= 16 ? 64 : 0) + column;
    }

    // Writes rows [first_row, first_row + tile_rows) of the matrix q, which has `rows` rows, into q_t [columns, rows]. A
    // thread transposes 16 rows of four columns.
    __device__ __forceinline__ void write(uint8_t* q_t, int64_t first_row, int64_t rows, int tile_rows) const {
        const int halves = tile_rows / 16;
        for (int i = threadIdx.x; i < columns / 4 * halves; i += blockDim.x) {
            const int row = halves == 2 ? i % 2 * 16 : 0, column = (halves == 2 ? i / 2 : i) * 4;
            if (first_row + row >= rows) {
                continue;
            }
            uint32_t words[16];
#pragma unroll
            for (int r = 0; r < 16; ++r) {
                words[r] = *reinterpret_cast<const uint32_t*>(at(row + r, column));
            }
#pragma unroll
            for (int r = 0; r < 16; r += 4) {
                transpose_bytes(words[r], words[r + 1], words[r + 2], words[r + 3]);
            }
            uint8_t* to = q_t + column * rows + first_row + row;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                *reinterpret_cast<uint4*>(to + c * rows) = make_uint4(words[c], words[4 + c], words[8 + c], words[12 + c]);
            }
        }
    }
};

// Returns the rows of a block: 32, or 16 if 32 rows of bytes exceed the shared memory of a block, or 0 if 16 do too.
inline int tile_rows_for(int64_t columns, const char* op) {
    int device = 0, available = 0;
    check_cuda(cudaGetDevice(&device), op);
    check_cuda(cudaDeviceGetAttribute(&available, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op);
    available -= 1024;  // static shared memory
    return RowTile::size(32, columns) <= available ? 32 : RowTile::size(16, columns) <= available ? 16 : 0;
}

}  // namespace surogate
