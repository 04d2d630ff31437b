// The logical matrices of a param that are fused along its rows (q, k, v; gate, up), and how a grid is divided among them.
//
//   const FusedRows fused = fused_rows(rows, [&](int64_t n) { return chunks of a matrix of n rows; },
//                                      [&](int64_t n) { return scales of a matrix of n rows; }, op);
//   kernel<<<fused.chunks(op), threads, 0, stream>>>(..., fused);
//   ...
//   const FusedMatrix matrix = fused.of_chunk(blockIdx.x);     // in the kernel, which takes a FusedRows by value
//   const int64_t chunk = blockIdx.x - matrix.first_chunk;
//
// A thread block handles a chunk of one matrix, so that what differs between matrices is uniform in it.
//
// Models fuse few matrices of different heights, but as many of equal height as they have experts: a thousand and more.
// So a grid knows runs of equal matrices, in 1 KB of arguments, and a division finds the matrix within its run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "surogate/check.h"

namespace surogate {

constexpr int max_fused_runs = 32;

// A matrix of a param: its rows are [first_row, end_row), its scales [first_scale, end_scale).
struct FusedMatrix {
    int index;
    int64_t first_row, end_row;
    int64_t first_chunk;
    int64_t first_scale, end_scale;
};

struct FusedRows {
    // Matrices of equal height, one after another: where the first one begins, and the size of each.
    struct Run {
        uint32_t matrix, first_row, first_chunk, first_scale;
        uint32_t rows, chunks, scales;
    };

    int count;  // matrices
    int runs;
    int64_t rows, total_chunks;
    Run run[max_fused_runs];

    __device__ __forceinline__ FusedMatrix of_chunk(uint32_t chunk) const {
        const Run& found = last_begun<&Run::first_chunk>(chunk);
        return matrix_in(found, (chunk - found.first_chunk) / found.chunks);
    }
    __device__ __forceinline__ FusedMatrix of_row(uint32_t row) const {
        const Run& found = last_begun<&Run::first_row>(row);
        return matrix_in(found, (row - found.first_row) / found.rows);
    }
    __device__ __forceinline__ FusedMatrix matrix(uint32_t index) const {
        const Run& found = last_begun<&Run::matrix>(index);
        return matrix_in(found, index - found.matrix);
    }

    // Returns the number of thread blocks.
    unsigned chunks(const char* op) const { return static_cast<unsigned>(to_int(total_chunks, op, "the grid")); }

private:
    // Returns the last run whose first element is not behind `at`.
    template <uint32_t Run::*First>
    __device__ __forceinline__ const Run& last_begun(uint32_t at) const {
        int begin = 0;
        for (int end = runs; end - begin > 1;) {
            const int middle = (begin + end) / 2;
            (run[middle].*First <= at ? begin : end) = middle;
        }
        return run[begin];
    }

    static __device__ __forceinline__ FusedMatrix matrix_in(const Run& run, uint32_t i) {
        const int64_t row = run.first_row + i * run.rows, scale = run.first_scale + i * run.scales;
        return {static_cast<int>(run.matrix + i), row, row + run.rows, run.first_chunk + i * run.chunks, scale, scale + run.scales};
    }
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
    SUROGATE_REQUIRE(!rows.empty(), op, "there are no matrices");
    FusedRows fused{};
    int64_t scales = 0;
    for (const int64_t height : rows) {
        check_positive(height, op, "rows");
        const int64_t chunks = chunks_of(height), own = scales_of(height);
        if (fused.runs == 0 || fused.run[fused.runs - 1].rows != height) {
            SUROGATE_REQUIRE(fused.runs < max_fused_runs, op,
                             "more than " + std::to_string(max_fused_runs) + " runs of matrices of equal height are fused, of " +
                                 std::to_string(rows.size()));
            fused.run[fused.runs++] = {static_cast<uint32_t>(fused.count),        static_cast<uint32_t>(fused.rows),
                                       static_cast<uint32_t>(fused.total_chunks), static_cast<uint32_t>(scales),
                                       static_cast<uint32_t>(height),             static_cast<uint32_t>(chunks),
                                       static_cast<uint32_t>(own)};
        }
        ++fused.count;
        fused.rows += height;
        fused.total_chunks += chunks;
        scales += own;
        to_int(fused.rows, op, "rows");
        to_int(scales, op, "scales");
    }
    return fused;
}

}  // namespace surogate
