// lora_pack and lora_unpack: copies rectangles between row-major matrices, any number of them in one launch.
//
//   to[r, c] = scale * from[r, c]     for r < rows, c < columns; 0 without `from`; += where the rectangle accumulates
//
//   table    [moves] entries of 8 int64 words in device memory, see Move. No two of them write the same element.
//   largest  octets of the largest rectangle: rows * ceil(columns / 8)
//
// Elements are fp32 or bf16, `from` and `to` each its own. In fp32: the product is rounded, then the sum, then the result
// to its dtype, each to nearest even, so they have the bits of `surogate_lora.reference`. Only fp32 accumulates.
//
// Pointers are aligned to their element. 16-byte accesses where pointer and stride of a side are multiples of 16 bytes
// and 8 elements, but for what is left of eight at the end of a row. blockIdx.y is the rectangle; its blocks share its
// octets, one a thread and turn.
//
// Bytes: each element once read and once written. Rank 16 on the projections of an 8B block: A 2.4 MB in and 1.2 MB
// out, B 2.6 and 2.4 MB (its zeros included), the gradients 7.2 in and 9.9 MB read and written: 2 and 4 us at 4.2 TB/s,
// about the time of a launch.
#include "pack.h"

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"

namespace surogate {
namespace {

constexpr const char* op = "lora_move";
constexpr int threads = 256;
constexpr int64_t most_blocks = 128;  // of a rectangle

struct Move {
    const void* from;  // null: zeros
    void* to;
    int64_t from_stride;  // elements from row to row
    int64_t to_stride;
    int64_t rows;
    int64_t columns;
    int64_t kinds;  // dtype of from, of to << 8, accumulates << 16
    double scale;
};
static_assert(sizeof(Move) == 8 * sizeof(int64_t));

__device__ __forceinline__ bool in_octets(const void* pointer, int64_t stride) {
    return stride % octet == 0 && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

template <class From, class To>
__device__ __forceinline__ void move(const Move& m, bool accumulate) {
    const From* from = static_cast<const From*>(m.from);
    To* to = static_cast<To*>(m.to);
    const bool from_aligned = in_octets(from, m.from_stride), to_aligned = in_octets(to, m.to_stride);
    const float scale = static_cast<float>(m.scale);
    const int64_t per_row = (m.columns + octet - 1) / octet;
    const int64_t step = static_cast<int64_t>(gridDim.x) * threads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x; i < m.rows * per_row; i += step) {
        const int64_t row = i / per_row, first = i % per_row * octet;
        const int64_t count = m.columns - first;
        const bool whole = count >= octet;
        float values[octet] = {};
        if (from != nullptr) {
            load_octet(from + row * m.from_stride + first, values, count, from_aligned && whole);
#pragma unroll
            for (int j = 0; j < octet; ++j) {
                values[j] = __fmul_rn(scale, values[j]);
            }
        }
        To* target = to + row * m.to_stride + first;
        if (accumulate) {
            float before[octet];
            load_octet(target, before, count, to_aligned && whole);
#pragma unroll
            for (int j = 0; j < octet; ++j) {
                values[j] = __fadd_rn(before[j], values[j]);
            }
        }
        store_octet(target, values, count, to_aligned && whole);
    }
}

__global__ void __launch_bounds__(threads) lora_move_kernel(const Move* table) {
    const Move m = table[blockIdx.y];
    const bool accumulate = m.kinds >> 16;
    const bool wide_from = (m.kinds & 255) == FP32, wide_to = (m.kinds >> 8 & 255) == FP32;
    if (wide_from && wide_to) {
        move<float, float>(m, accumulate);
    } else if (wide_from) {
        move<float, __nv_bfloat16>(m, false);
    } else if (wide_to) {
        move<__nv_bfloat16, float>(m, accumulate);
    } else {
        move<__nv_bfloat16, __nv_bfloat16>(m, false);
    }
}

}  // namespace

void lora_move(const void* table, int64_t moves, int64_t largest, cudaStream_t stream) {
    check_pointer(table, op, "table", 8);
    check_positive(moves, op, "moves");
    check_positive(largest, op, "largest");
    SUROGATE_REQUIRE(moves <= 65535, op, "at most 65535 moves, got " + std::to_string(moves));
    const int64_t blocks = ceil_div(largest, threads);
    const dim3 grid(static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks), static_cast<unsigned>(moves));
    lora_move_kernel<<<grid, threads, 0, stream>>>(static_cast<const Move*>(table));
    check_launch(op);
}

}  // namespace surogate
