// dora_row_norms: norm[i] = sqrt(sum over k of (W[i, k] + sum over r of up[i, r] * down[r, k])^2)
//
//   weight   [rows, columns] fp32 or bf16
//   down     [ranks, columns], up [rows, ranks], alike fp32 or bf16; both null and ranks 0: the norms of W
//   norm     [rows] fp32 or bf16. It is overwritten.
//
// All sums are in fp32. The threads of a block sum every 256th octet of columns each, and a tree adds these sums, so
// results do not depend on timing. A rank whose `up` is zero in all rows of a block is not read: of matrices with several
// projections, a block then reads the ranks of its own.
//
// Pointers are aligned to their element; 16-byte accesses where the rows of a matrix begin at multiples of 16 bytes, but
// for what is left of eight at the end of a row. A block takes 8 rows.
// Bytes: W once, `down` once for each block (from L2). Arithmetic: 2 * rows * columns * ranks of a projection, in FMAs
// of fp32: 0.05 ms of memory and some 0.1 ms of FMAs for [24576, 4096] in bf16 with two projections of rank 16 on an H100.
#include "row_norms.h"

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"

namespace surogate {
namespace {

constexpr const char* op = "dora_row_norms";
constexpr int threads = 256;
constexpr int block_rows = 8;
constexpr int64_t most_ranks = 1024;  // whose coefficients fit into shared memory

__device__ __forceinline__ bool in_octets(const void* pointer, int64_t columns) {
    return columns % octet == 0 && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

template <class W, class M>
__global__ void __launch_bounds__(threads)
    row_norms_kernel(const W* weight, const M* down, const M* up, void* norm, int64_t rows, int64_t columns, int ranks,
                     bool is_wide) {
    extern __shared__ float shared[];
    float* coefficients = shared;                                  // [block_rows, ranks]
    float* sums = coefficients + block_rows * ranks;               // [block_rows, threads]
    bool* used = reinterpret_cast<bool*>(sums + block_rows * threads);  // [ranks]
    const int64_t row = static_cast<int64_t>(blockIdx.x) * block_rows;
    const int held = rows - row < block_rows ? static_cast<int>(rows - row) : block_rows;
    for (int r = threadIdx.x; r < ranks; r += threads) {
        bool any = false;
        for (int i = 0; i < block_rows; ++i) {
            const float c = i < held ? to_float(up[(row + i) * ranks + r]) : 0.0f;
            coefficients[i * ranks + r] = c;
            any = any || c != 0.0f;
        }
        used[r] = any;
    }
    __syncthreads();
    const bool weight_aligned = in_octets(weight, columns), down_aligned = in_octets(down, columns);
    float squares[block_rows] = {};
    for (int64_t first = static_cast<int64_t>(threadIdx.x) * octet; first < columns; first += threads * octet) {
        const int64_t count = columns - first;
        const bool whole = count >= octet;
        float total[block_rows][octet] = {};
#pragma unroll
        for (int i = 0; i < block_rows; ++i) {
            if (i < held) {
                load_octet(weight + (row + i) * columns + first, total[i], count, weight_aligned && whole);
            }
        }
        for (int r = 0; r < ranks; ++r) {
            if (!used[r]) {
                continue;
            }
            float d[octet];
            load_octet(down + r * columns + first, d, count, down_aligned && whole);
#pragma unroll
            for (int i = 0; i < block_rows; ++i) {
                const float c = coefficients[i * ranks + r];
#pragma unroll
                for (int j = 0; j < octet; ++j) {
                    total[i][j] = fmaf(c, d[j], total[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < block_rows; ++i) {
#pragma unroll
            for (int j = 0; j < octet; ++j) {
                squares[i] = fmaf(total[i][j], total[i][j], squares[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < block_rows; ++i) {
        sums[i * threads + threadIdx.x] = squares[i];
    }
    for (int half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half) {
#pragma unroll
            for (int i = 0; i < block_rows; ++i) {
                sums[i * threads + threadIdx.x] += sums[i * threads + threadIdx.x + half];
            }
        }
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < held) {
        const float found = sqrtf(sums[threadIdx.x * threads]);
        if (is_wide) {
            static_cast<float*>(norm)[row + threadIdx.x] = found;
        } else {
            static_cast<__nv_bfloat16*>(norm)[row + threadIdx.x] = from_float<__nv_bfloat16>(found);
        }
    }
}

template <class W, class M>
void launch(const void* weight, const void* down, const void* up, void* norm, int64_t rows, int64_t columns, int64_t ranks,
            bool is_wide, cudaStream_t stream) {
    check_pointer(weight, op, "weight", sizeof(W));
    if (ranks > 0) {
        check_pointer(down, op, "down", sizeof(M));
        check_pointer(up, op, "up", sizeof(M));
    }
    const int blocks = to_int(ceil_div(rows, block_rows), op, "rows / 8");
    const size_t bytes = (block_rows * (ranks + threads)) * sizeof(float) + ranks * sizeof(bool);
    row_norms_kernel<W, M><<<blocks, threads, bytes, stream>>>(static_cast<const W*>(weight), static_cast<const M*>(down),
                                                               static_cast<const M*>(up), norm, rows, columns,
                                                               static_cast<int>(ranks), is_wide);
    check_launch(op);
}

}  // namespace

void dora_row_norms(const void* weight, const void* down, const void* up, void* norm, int64_t rows, int64_t columns,
                    int64_t ranks, int dtype_weight, int dtype_matrices, int dtype_norm, cudaStream_t stream) {
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(ranks >= 0 && ranks <= most_ranks, op, "ranks must be 0 to 1024, got " + std::to_string(ranks));
    for (const int dtype : {dtype_weight, dtype_matrices, dtype_norm}) {
        SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, std::string("must be fp32 or bf16, not ") + name_of(dtype));
    }
    const bool is_wide = dtype_norm == FP32;
    check_pointer(norm, op, "norm", is_wide ? 4 : 2);
    if (dtype_weight == FP32 && dtype_matrices == FP32) {
        launch<float, float>(weight, down, up, norm, rows, columns, ranks, is_wide, stream);
    } else if (dtype_weight == FP32) {
        launch<float, __nv_bfloat16>(weight, down, up, norm, rows, columns, ranks, is_wide, stream);
    } else if (dtype_matrices == FP32) {
        launch<__nv_bfloat16, float>(weight, down, up, norm, rows, columns, ranks, is_wide, stream);
    } else {
        launch<__nv_bfloat16, __nv_bfloat16>(weight, down, up, norm, rows, columns, ranks, is_wide, stream);
    }
}

}  // namespace surogate
