// Packed dq, or dk and dv in one launch, of some heads to their columns of dqkv.
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

// Addresses of what is copied, one for each blockIdx.y.
template <class Pointer>
struct Two {
    Pointer first, second;
};

// `columns` and `row` are in words.
__global__ void __launch_bounds__(threads) unpack_kernel(Two<const uint4*> packed, Two<uint4*> target, unsigned words,
                                                         unsigned columns, int64_t row) {
    const unsigned index = blockIdx.x * threads + threadIdx.x;
    if (index >= words) {
        return;
    }
    const uint4* from = blockIdx.y == 0 ? packed.first : packed.second;
    uint4* to = blockIdx.y == 0 ? target.first : target.second;
    const unsigned token = index / columns, column = index % columns;
    to[token * row + column] = from[index];
}

void unpack(Two<const void*> packed, Two<void*> target, unsigned count, int64_t tokens, int64_t columns, int64_t row,
            const char* op, cudaStream_t stream) {
    check_pointer(packed.first, op, "packed", 16);
    check_pointer(packed.second, op, "packed", 16);
    check_pointer(target.first, op, "columns", 16);
    check_pointer(target.second, op, "columns", 16);
    check_positive(tokens, op, "tokens");
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(columns % word_elements == 0 && row % word_elements == 0, op,
                     "columns and row must be multiples of 8, got " + std::to_string(columns) + " and " +
                         std::to_string(row));
    const int words = to_int(tokens * (columns / word_elements), op, "tokens * columns / 8");
    const dim3 grid(static_cast<unsigned>(ceil_div(words, threads)), count);
    const auto words_at = [](const void* from) { return static_cast<const uint4*>(from); };
    unpack_kernel<<<grid, threads, 0, stream>>>(
        {words_at(packed.first), words_at(packed.second)},
        {static_cast<uint4*>(target.first), static_cast<uint4*>(target.second)}, static_cast<unsigned>(words),
        static_cast<unsigned>(columns / word_elements), row / word_elements);
    check_launch(op);
}

}  // namespace

void unpack_dkv(const void* dk, const void* dv, void* dk_columns, void* dv_columns, int64_t tokens, int64_t columns,
                int64_t row, cudaStream_t stream) {
    unpack({dk, dv}, {dk_columns, dv_columns}, 2, tokens, columns, row, "unpack_dkv", stream);
}

void unpack_columns(const void* packed, void* target, int64_t tokens, int64_t columns, int64_t row,
                    cudaStream_t stream) {
    unpack({packed, packed}, {target, target}, 1, tokens, columns, row, "unpack_columns", stream);
}

}  // namespace surogate
