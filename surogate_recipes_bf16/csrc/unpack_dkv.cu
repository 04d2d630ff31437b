// Packed dk and dv of some heads to their columns of dqkv, in one launch.
//
//   dk_columns[t, c] = dk[t, c]          dv_columns[t, c] = dv[t, c]
//
//   dk, dv                    [tokens, columns] bf16
//   dk_columns, dv_columns    addresses of columns of dqkv [tokens, row] bf16, written
//
// All pointers must be aligned to 16 bytes, `columns` and `row` multiples of 8. A thread moves 16 bytes. Bytes: dk and dv
// read and written once, 134 MB and a floor of 32 us each for 32,768 tokens of 8 heads of 128. cudaMemcpy2DAsync, one
// call for each, took 80 us each on an H200.

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "attention.h"
#include "surogate/check.h"

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr int64_t word_elements = 8;  // bf16 elements in 16 bytes

// `columns` and `row` are in words. blockIdx.y: 0 for dk, 1 for dv.
__global__ void __launch_bounds__(threads) unpack_dkv_kernel(const uint4* dk, const uint4* dv, uint4* dk_columns,
                                                             uint4* dv_columns, unsigned words, unsigned columns,
                                                             int64_t row) {
    const unsigned index = blockIdx.x * threads + threadIdx.x;
    if (index >= words) {
        return;
    }
    const uint4* packed = blockIdx.y == 0 ? dk : dv;
    uint4* target = blockIdx.y == 0 ? dk_columns : dv_columns;
    const unsigned token = index / columns, column = index % columns;
    target[token * row + column] = packed[index];
}

}  // namespace

void unpack_dkv(const void* dk, const void* dv, void* dk_columns, void* dv_columns, int64_t tokens, int64_t columns,
                int64_t row, cudaStream_t stream) {
    constexpr auto op = "unpack_dkv";
    check_pointer(dk, op, "dk", 16);
    check_pointer(dv, op, "dv", 16);
    check_pointer(dk_columns, op, "dk_columns", 16);
    check_pointer(dv_columns, op, "dv_columns", 16);
    check_positive(tokens, op, "tokens");
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(columns % word_elements == 0 && row % word_elements == 0, op,
                     "columns and row must be multiples of 8, got " + std::to_string(columns) + " and " +
                         std::to_string(row));
    const int words = to_int(tokens * (columns / word_elements), op, "tokens * columns / 8");
    const dim3 grid(static_cast<unsigned>(ceil_div(words, threads)), 2);
    unpack_dkv_kernel<<<grid, threads, 0, stream>>>(
        static_cast<const uint4*>(dk), static_cast<const uint4*>(dv), static_cast<uint4*>(dk_columns),
        static_cast<uint4*>(dv_columns), static_cast<unsigned>(words), static_cast<unsigned>(columns / word_elements),
        row / word_elements);
    check_launch(op);
}

}  // namespace surogate
