// How RMS norms divide the rows of a matrix among threads, and the arithmetic of a row. Kernels that fuse a norm share it,
// so that they give the bits of rmsnorm: the order of the sum over a row is that of the threads which hold it.
//
// If all pointers are aligned to 16 bytes and rows are a multiple of 16 bytes, a row is read once and kept in registers
// for the second pass. Grid: one warp per row up to 4 KiB (2048 columns in bf16, 1024 in fp32), otherwise one block per
// row, up to 64 KiB (32768, 16384). Longer or unaligned rows are read a second time, from L2.
#pragma once

#include <surogate/dispatch.cuh>
#include <surogate/reduce.cuh>

namespace surogate {

constexpr int kRowsPerBlock = 4;  // in kernels with one warp per row

// Width: elements of a vector. Held: number of vectors of a row that a thread keeps in registers; 0: it reads them again.
template <int Width, int Held, bool WarpRow>
struct RowShape {
    static constexpr int width = Width;
    static constexpr int held = Held;
    static constexpr bool warp_row = WarpRow;
};

// Calls launch(RowShape, blocks, threads). wide: vectors of 16 bytes may be used.
template <class T, class Launch>
void with_row_shape(int64_t rows, int columns, bool wide, const char* op, Launch&& launch) {
    constexpr int n = vector_width<T>;
    const auto blocks = static_cast<unsigned>(to_int(rows, op, "rows"));
    const int vectors = columns / n;
    const auto warp_row = [&](auto shape) {
        launch(shape, static_cast<unsigned>(ceil_div(rows, kRowsPerBlock)), 32u * kRowsPerBlock);
    };
    const auto block_row = [&](auto shape) {
        launch(shape, blocks, static_cast<unsigned>(ceil_div(ceil_div(vectors, decltype(shape)::held), 32) * 32));
    };
    const auto any_row = [&](auto shape, int64_t units) {
        launch(shape, blocks, static_cast<unsigned>(units >= 1024 ? 1024 : ceil_div(units, 32) * 32));
    };
    if (!wide) {
        any_row(RowShape<1, 0, false>{}, columns);
    } else if (vectors <= 2 * 32) {
        warp_row(RowShape<n, 2, true>{});
    } else if (vectors <= 4 * 32) {
        warp_row(RowShape<n, 4, true>{});
    } else if (vectors <= 8 * 32) {
        warp_row(RowShape<n, 8, true>{});
    } else if (vectors <= 2 * 1024) {
        block_row(RowShape<n, 2, false>{});
    } else if (vectors <= 4 * 1024) {
        block_row(RowShape<n, 4, false>{});
    } else {
        any_row(RowShape<n, 0, false>{}, vectors);
    }
    check_launch(op);
}

// Returns the sum over the threads of a row to each of them. `scratch`: shared memory for 32 floats.
template <bool WarpRow>
__device__ __forceinline__ float row_sum(float value, float* scratch) {
    if constexpr (WarpRow) {
        return warp_sum(value);
    } else {
        return block_sum(value, scratch);
    }
}

// Uses fmaf explicitly, because all ops with a norm, and a norm recomputed from its residual, must be bit-identical.
__device__ __forceinline__ float add_square(float value, float sum) { return fmaf(value, value, sum); }

__device__ __forceinline__ float rstd_of(float sum_of_squares, int columns, float eps) {
    return 1.0f / sqrtf(sum_of_squares / columns + eps);
}

}  // namespace surogate
