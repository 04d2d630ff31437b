// Columns of some heads from or to packed tensors, several tensors in one launch.
//
//   to[t, c] = from[t, c]
//
//   from    address of columns [tokens, columns] bf16 with a stride of from_row elements
//   to      address of columns [tokens, columns] bf16 with a stride of to_row elements, written
//
// All pointers must be aligned to 16 bytes, columns and strides multiples of 8. A thread moves 16 bytes. Bytes: each
// element read and written once; dk and dv of 8 heads of 128, 32,768 tokens: 134 MB and a floor of 32 us each.
// cudaMemcpy2DAsync, one call for each, took 80 us each on an H200.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "attention.h"
#include "surogate/check.h"

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr int64_t word_elements = 8;  // bf16 elements in 16 bytes

// A copy, in words.
struct Copy {
    const uint4* from;
    uint4* to;
    int64_t from_row, to_row;
    unsigned columns, words;
};

struct Copies {
    Copy each[max_column_copies];
};

// blockIdx.y is the number of the copy.
__global__ void __launch_bounds__(threads) copy_columns_kernel(const __grid_constant__ Copies copies) {
    const Copy& copy = copies.each[blockIdx.y];
    const unsigned index = blockIdx.x * threads + threadIdx.x;
    if (index >= copy.words) {
        return;
    }
    const unsigned token = index / copy.columns, column = index % copy.columns;
    copy.to[token * copy.to_row + column] = copy.from[token * copy.from_row + column];
}

}  // namespace

void copy_columns(const ColumnCopy* copies, int64_t count, int64_t tokens, cudaStream_t stream) {
    constexpr auto op = "copy_columns";
    check_positive(tokens, op, "tokens");
    SUROGATE_REQUIRE(count > 0 && count <= max_column_copies, op,
                     "from 1 to " + std::to_string(max_column_copies) + " copies, got " + std::to_string(count));
    Copies given{};
    int most = 0;
    for (int64_t i = 0; i < count; ++i) {
        const ColumnCopy& copy = copies[i];
        check_pointer(copy.from, op, "from", 16);
        check_pointer(copy.to, op, "to", 16);
        check_positive(copy.columns, op, "columns");
        for (const int64_t elements : {copy.columns, copy.from_row, copy.to_row}) {
            SUROGATE_REQUIRE(elements % word_elements == 0, op,
                             "columns and strides must be multiples of 8, got " + std::to_string(elements));
        }
        const int words = to_int(tokens * (copy.columns / word_elements), op, "tokens * columns / 8");
        most = std::max(most, words);
        given.each[i] = {static_cast<const uint4*>(copy.from), static_cast<uint4*>(copy.to),
                         copy.from_row / word_elements, copy.to_row / word_elements,
                         static_cast<unsigned>(copy.columns / word_elements), static_cast<unsigned>(words)};
    }
    const dim3 grid(static_cast<unsigned>(ceil_div(most, threads)), static_cast<unsigned>(count));
    copy_columns_kernel<<<grid, threads, 0, stream>>>(given);
    check_launch(op);
}

}  // namespace surogate
