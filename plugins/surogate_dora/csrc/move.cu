// dora_pack and dora_unpack: copies a matrix into a band of columns of another one, or out of it.
//
//   dora_move   to[r, c] (+)= scale * from[r, c - first]    for r < rows, c < columns, where first <= c < first + width;
//               0 for the other columns; and without `from`, all are 0
//
//   from        [rows, width] with from_stride elements from row to row; null: zeros
//   to          [rows, columns] with to_stride elements from row to row
//   accumulates 1: add to what is there, fp32 only
//
// Elements are fp32 or bf16, `from` and `to` each its own. In fp32: the product is rounded, then the sum, then the result
// to its dtype, each to nearest even, so they have the bits of `surogate_dora.reference`.
//
// Pointers are aligned to their element. A thread takes an element and turn; a warp reads and writes 32 neighbours.
// Bytes: each element once read and once written: A and B of a block of Qwen3-8B with rank 16, 5 MB in and 4 MB out.
#include "move.h"

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

constexpr const char* op = "dora_move";
constexpr int threads = 256;
constexpr int64_t most_blocks = 4096;

template <class From, class To>
__global__ void __launch_bounds__(threads)
    move_kernel(const From* from, To* to, int64_t from_stride, int64_t to_stride, int64_t rows, int64_t columns,
                int64_t first, int64_t width, float scale, bool accumulates) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * threads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x; i < rows * columns; i += step) {
        const int64_t row = i / columns, column = i % columns - first;
        const bool inside = from != nullptr && column >= 0 && column < width;
        float value = inside ? __fmul_rn(scale, to_float(from[row * from_stride + column])) : 0.0f;
        To* target = to + row * to_stride + first + column;
        if (accumulates) {
            value = __fadd_rn(to_float(*target), value);
        }
        *target = from_float<To>(value);
    }
}

template <class From, class To>
void launch(const void* from, void* to, int64_t from_stride, int64_t to_stride, int64_t rows, int64_t columns,
            int64_t first, int64_t width, double scale, bool accumulates, cudaStream_t stream) {
    SUROGATE_REQUIRE(is_aligned(from, sizeof(From)), op, "from must be aligned to its element");
    check_pointer(to, op, "to", sizeof(To));
    const int64_t blocks = ceil_div(rows * columns, threads);
    move_kernel<From, To><<<static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks), threads, 0, stream>>>(
        static_cast<const From*>(from), static_cast<To*>(to), from_stride, to_stride, rows, columns, first, width,
        static_cast<float>(scale), accumulates);
    check_launch(op);
}

}  // namespace

void dora_move(const void* from, void* to, int64_t from_stride, int64_t to_stride, int64_t rows, int64_t columns,
               int64_t first, int64_t width, double scale, int dtype_from, int dtype_to, int accumulates,
               cudaStream_t stream) {
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(first >= 0 && width >= 0 && first + width <= columns, op, "the band leaves the columns");
    for (const int dtype : {dtype_from, dtype_to}) {
        SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, std::string("must be fp32 or bf16, not ") + name_of(dtype));
    }
    SUROGATE_REQUIRE(!accumulates || dtype_to == FP32, op, "only fp32 accumulates");
    const bool adds = accumulates != 0;
    if (dtype_from == FP32 && dtype_to == FP32) {
        launch<float, float>(from, to, from_stride, to_stride, rows, columns, first, width, scale, adds, stream);
    } else if (dtype_from == FP32) {
        launch<float, __nv_bfloat16>(from, to, from_stride, to_stride, rows, columns, first, width, scale, adds, stream);
    } else if (dtype_to == FP32) {
        launch<__nv_bfloat16, float>(from, to, from_stride, to_stride, rows, columns, first, width, scale, adds, stream);
    } else {
        launch<__nv_bfloat16, __nv_bfloat16>(from, to, from_stride, to_stride, rows, columns, first, width, scale, adds,
                                             stream);
    }
}

}  // namespace surogate
