// The logical matrices of a param that are fused along its rows (q, k, v; gate, up), and how a grid is divided among them.
//
//   const FusedRows fused = fused_rows(rows, [&](int64_t n) { return chunks of a matrix of n rows; },
//                                      [&](int64_t n) { return scales of a matrix of n rows; }, op);
//   kernel<<<fused.chunks(op), threads, 0, stream>>>(..., fused);
//   ...
//   const int matrix = fused.matrix_of(blockIdx.x);            // in the kernel, which takes a FusedRows by value
//   const int64_t chunk = blockIdx.x - fused.first_chunk[matrix];
//
// A thread block handles a chunk of one matrix, so that what differs between matrices is uniform in it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "surogate/check.h"

namespace surogate {

// 128 experts have 256. Kernels take 6 KB of arguments, which CUDA 12.1 allows.
constexpr int max_matrices = 256;

// Returns the last of `count` matrices whose first element, by `first`, is not behind `at`.
__device__ __forceinline__ int last_begun(const int64_t (&first)[max_matrices + 1], int count, int64_t at) {
    int begin = 0;
    for (int end = count; end - begin > 1;) {
        const int middle = (begin + end) / 2;
        (first[middle] <= at ? begin : end) = middle;
    }
    return begin;
}

// Element i of an array is the first one of matrix i, element `count` the total.
struct FusedRows {
    int count;
    int64_t first_row[max_matrices + 1];
    int64_t first_chunk[max_matrices + 1];
    int64_t first_scale[max_matrices + 1];

    __device__ __forceinline__ int matrix_of(int64_t chunk) const {
        return last_begun(first_chunk, count, chunk);
    }

    // Returns the number of thread blocks.
    unsigned chunks(const char* op) const { return static_cast<unsigned>(to_int(first_chunk[count], op, "the grid")); }
};

// Returns the exponent of a power of two, by which a kernel divides.
constexpr int exponent_of(int64_t power) {
    int exponent = 0;
    while (int64_t{1} << exponent < power) {
        ++exponent;
    }
    return exponent;
}

template <class Chunks, class Scales>
FusedRows fused_rows(const std::vector<int64_t>& rows, Chunks chunks_of, Scales scales_of, const char* op) {
    SUROGATE_REQUIRE(!rows.empty() && rows.size() <= max_matrices, op,
                     "1 to 256 matrices can be fused, got " + std::to_string(rows.size()));
    FusedRows fused{};
    fused.count = static_cast<int>(rows.size());
    for (int i = 0; i < fused.count; ++i) {
        check_positive(rows[i], op, "rows");
        fused.first_row[i + 1] = fused.first_row[i] + rows[i];
        fused.first_chunk[i + 1] = fused.first_chunk[i] + chunks_of(rows[i]);
        fused.first_scale[i + 1] = fused.first_scale[i] + scales_of(rows[i]);
    }
    return fused;
}

}  // namespace surogate
