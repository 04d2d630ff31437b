// Products of experts whose weights have at most 32 columns on one side, by mma.sync, for SM80 and later; grouped_gemm.h
// describes the operands:
//
//   forward   y [rows,n] = x w_e^T, n narrow        wgrad   dw_e [n,k] = dy_e^T x_e, n or k narrow
//   dgrad     dx [rows,k] = dy w_e, k narrow
//
// Their time is that of reading the wide operand once, from memory straight to the registers that mma.sync reads: a sum has
// its terms in any order, and a result its columns, so each lane loads 16 bytes of a row, and two lanes need nothing of each
// other. No warp waits for another one before the end. Loads of the next step are issued before the products of this one.
//
// Forward and dgrad: a block has 32 rows, or 16 where more than 16 columns are narrow, and its warps share the terms: of 256
// terms, 512 bytes of each row, a warp has 32. Their sums are added in order. Grid: rows / side + experts.
//
// wgrad: a warp has 64 columns of the wide operand and the rows of an expert, which up to 8 warps share where there are more
// than 128: routers may choose a few experts for all tokens. Grid: (columns / 64, experts), of which the blocks behind those
// that are needed return. Experts without rows get zeros.
//
// Sums are fp32 in one order, so results repeat. What lies outside of an expert, or of its matrix, is 0 and is not read.
//
// Bytes of Qwen3-30B-A3B with rank 16, 16,384 rows: x A^T of gate and up 76 MB, of down 29, dy B 57 and 76: 71 us at 3.35 TB/s.
// Gradients of A and B in fp32, which they read too where they accumulate, 84 to 101 and 31 to 38, 63 to 76 and 84 to 101: 78
// to 94 us. FLOPs: 0.4 to 1.1e9 each.
#include <cuda_runtime.h>

#include <string>
#include <type_traits>

#include "grouped_gemm.h"
#include "grouped_narrow.h"
#include "groups.cuh"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/mma.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

using T = __nv_bfloat16;
using Words = Vec<uint32_t, 4>;  // 8 elements of a row
constexpr const char* op_name = "grouped_narrow";
constexpr int octet = 8;
constexpr int most_narrow = 32;

__device__ __forceinline__ Words load_words(const T* from, bool exists) {
    return exists ? Words::load(reinterpret_cast<const uint32_t*>(from)) : Words{};
}

__device__ __forceinline__ uint32_t load_word(const T* from, bool exists) {
    return exists ? *reinterpret_cast<const uint32_t*>(from) : 0;
}

constexpr int warps = 8;
constexpr int step_terms = 32;  // of a warp: those of lane l are 8 (l % 4) and the next 7

// Octets: of columns of the result.
template <int Octets>
constexpr int blocks_of_rows = 4 / Octets;  // of 16

template <int Octets>
constexpr int side = 16 * blocks_of_rows<Octets>;

template <bool Dgrad, int Octets>
__global__ void __launch_bounds__(warps * 32, 3)
    rows_kernel(const T* x, const T* w, const int32_t* ends, T* y, int terms, int width, int experts) {
    constexpr int blocks = blocks_of_rows<Octets>, columns = Octets * octet;
    __shared__ float partial[warps][side<Octets>][columns];
    const Group group = group_of<side<Octets>>(ends, experts, static_cast<int>(blockIdx.x));
    if (group.expert < 0) {
        return;
    }
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const int quad = lane / 4, part = lane % 4;
    const int first = group.tile * side<Octets>;  // row of the group
    const T* matrix = w + static_cast<int64_t>(group.expert) * terms * width;

    struct Step {
        Words x[blocks][2];     // rows, rows + 8
        uint32_t w[Octets][4];  // terms 2 j and the next one of those of the lane; in dgrad of another one
    };
    const auto load = [&](int at) {
        Step step;
        const int t = at + part * octet;
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first + i * 16 + half * 8 + quad;
                step.x[i][half] = load_words(x + static_cast<int64_t>(group.start + row) * terms + t,
                                             row < group.rows && t < terms);
            }
        }
#pragma unroll
        for (int o = 0; o < Octets; ++o) {
            if constexpr (Dgrad) {
                // The rows of a matrix of 8 x 8 that is transposed are its terms, two of each of four lanes.
                const int row = at + quad / 2 * octet + quad % 2, column = o * octet + part * 2;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    step.w[o][j] = load_word(matrix + static_cast<int64_t>(row + 2 * j) * width + column,
                                             row + 2 * j < terms && column < width);
                }
            } else {
                const int column = o * octet + quad;
                const Words words = load_words(matrix + static_cast<int64_t>(column) * terms + t, column < width && t < terms);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    step.w[o][j] = words[j];
                }
            }
        }
        return step;
    };

    float sums[blocks][Octets][4] = {};
    Step step = load(warp * step_terms);
    for (int at = warp * step_terms; at < terms; at += warps * step_terms) {
        const Step next = load(at + warps * step_terms);
#pragma unroll
        for (int o = 0; o < Octets; ++o) {
            uint32_t part_w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                part_w[j] = Dgrad ? transposed(step.w[o][j]) : step.w[o][j];
            }
#pragma unroll
            for (int i = 0; i < blocks; ++i) {
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    const uint32_t part_x[4] = {step.x[i][0][j], step.x[i][1][j], step.x[i][0][j + 1], step.x[i][1][j + 1]};
                    multiply_add(sums[i][o], part_x, part_w[j], part_w[j + 1]);
                }
            }
        }
        step = next;
    }

#pragma unroll
    for (int i = 0; i < blocks; ++i) {
#pragma unroll
        for (int o = 0; o < Octets; ++o) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                partial[warp][i * 16 + e / 2 * 8 + quad][o * octet + part * 2 + e % 2] = sums[i][o][e];
            }
        }
    }
    __syncthreads();
    constexpr int chunk = 2;  // columns of a thread
    static_assert(side<Octets> * columns == warps * 32 * chunk);
    const int thread = static_cast<int>(threadIdx.x), row = thread * chunk / columns, column = thread * chunk % columns;
    if (first + row < group.rows && column < width) {
        float sum[chunk] = {};
        for (int i = 0; i < warps; ++i) {
#pragma unroll
            for (int e = 0; e < chunk; ++e) {
                sum[e] += partial[i][row][column + e];
            }
        }
        Vec<T, chunk>::from_float(sum).store(y + static_cast<int64_t>(group.start + first + row) * width + column);
    }
}

template <int Blocks>
constexpr int wgrad_warps = 8 / Blocks;
constexpr int own_columns = 64;  // of a warp: those of lane l are 8 (l / 4) and the next 7
constexpr int step_rows = 16;
constexpr int own_rows = 128;    // with more, warps share them

// Element (column of wide, column of narrow) of an expert is at their products with the strides, of which one is 1. Blocks: of
// 16 columns of narrow.
template <int Blocks, class D>
__global__ void __launch_bounds__(wgrad_warps<Blocks> * 32, Blocks + 1)
    wgrad_kernel(const T* wide, const T* narrow, const int32_t* ends, D* dw, int width, int width_narrow, int64_t stride,
                 int64_t stride_narrow, bool accumulate) {
    constexpr int warps = wgrad_warps<Blocks>, columns_narrow = Blocks * 16;
    __shared__ float partial[warps][columns_narrow][own_columns + 1];
    const int e = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int quad = lane / 4, part = lane % 4;
    const int64_t start = e == 0 ? 0 : ends[e - 1];
    const int rows = ends[e] - static_cast<int>(start);
    int sharing = 1;  // warps that share the rows of 64 columns
    while (sharing < warps && sharing * own_rows < rows) {
        sharing *= 2;
    }
    const int across = warps / sharing * own_columns, begin = static_cast<int>(blockIdx.x) * across;  // columns of the block
    if (begin >= width || (rows == 0 && accumulate)) {
        return;
    }
    const int c = begin + warp / sharing * own_columns + quad * octet;

    struct Step {
        Words wide[2][2];               // rows, rows + 8, of two rows one below the other
        uint32_t narrow[Blocks][2][2];  // columns, columns + 8, then rows, rows + 8
    };
    const auto load = [&](int at) {
        Step step;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = at + half * 8 + part * 2 + i;
                step.wide[half][i] = load_words(wide + (start + row) * width + c, row < rows && c < width);
            }
            const int row = at + half * 8 + quad;
#pragma unroll
            for (int i = 0; i < Blocks * 2; ++i) {
                const int column = i * octet + part * 2;
                step.narrow[i / 2][i % 2][half] =
                    load_word(narrow + (start + row) * width_narrow + column, row < rows && column < width_narrow);
            }
        }
        return step;
    };

    float sums[Blocks][octet][4] = {};  // of column i of each lane's
    Step step = load(warp % sharing * step_rows);
    for (int at = warp % sharing * step_rows; at < rows; at += sharing * step_rows) {
        const Step next = load(at + sharing * step_rows);
        uint32_t part_narrow[Blocks][4];
#pragma unroll
        for (int block = 0; block < Blocks; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                part_narrow[block][i] = transposed(step.narrow[block][i % 2][i / 2]);
            }
        }
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            const unsigned halves = i % 2 == 0 ? 0x5410 : 0x7632;  // of a word of each of the two rows
            const uint32_t low = __byte_perm(step.wide[0][0][i / 2], step.wide[0][1][i / 2], halves);
            const uint32_t high = __byte_perm(step.wide[1][0][i / 2], step.wide[1][1][i / 2], halves);
#pragma unroll
            for (int block = 0; block < Blocks; ++block) {
                multiply_add(sums[block][i], part_narrow[block], low, high);
            }
        }
        step = next;
    }

#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < octet; ++j) {
                partial[warp][block * 16 + i / 2 * 8 + quad][(part * 2 + i % 2) * octet + j] = sums[block][j][i];
            }
        }
    }
    __syncthreads();

    // Threads have elements beside each other, and read all old ones before they write.
    constexpr int each = own_columns * columns_narrow / 32;
    const int bits = 31 - __clz(across);
    const auto place = [&](int i, int& column, int& row) {
        const int at = i * warps * 32 + thread;
        row = stride == 1 ? at >> bits : at % columns_narrow;
        column = stride == 1 ? at & (across - 1) : at / columns_narrow;
        return column < across && begin + column < width && row < width_narrow;
    };
    D* matrix = dw + static_cast<int64_t>(e) * width * width_narrow + begin * stride;
    float old[each];
    int column, row;
#pragma unroll
    for (int i = 0; i < each; ++i) {
        old[i] = accumulate && place(i, column, row) ? to_float(matrix[column * stride + row * stride_narrow]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < each; ++i) {
        if (place(i, column, row)) {
            float sum = 0.0f;
            for (int j = 0; j < sharing; ++j) {
                sum += partial[column / own_columns * sharing + j][row][column % own_columns];
            }
            matrix[column * stride + row * stride_narrow] = from_float<D>(old[i] + sum);
        }
    }
}

}  // namespace

void grouped_narrow(const void* a, const void* b, const void* ends, void* d, int64_t rows, int64_t n, int64_t k,
                    int64_t experts, int kind, int dtype_d, bool accumulate, cudaStream_t stream) {
    check_grouped({rows, n, k, experts, kind, dtype_d, accumulate}, a, b, ends, d);
    const bool is_k = kind == DGRAD || (kind == WGRAD && k < n);
    const int width = static_cast<int>(is_k ? n : k), narrow = static_cast<int>(is_k ? k : n);
    SUROGATE_REQUIRE(narrow <= most_narrow, op_name, "at most 32 columns, got " + std::to_string(narrow));
    const int32_t* groups = static_cast<const int32_t*>(ends);
    const T *left = static_cast<const T*>(a), *right = static_cast<const T*>(b);
    if (kind == WGRAD) {
        const dim3 grid(static_cast<unsigned>(ceil_div(width, own_columns)), static_cast<unsigned>(experts));
        const auto launch = [&](auto* dw) {
            using D = std::remove_pointer_t<decltype(dw)>;
            const auto kernel = narrow <= 16 ? wgrad_kernel<1, D> : wgrad_kernel<2, D>;
            const int threads = 32 * (narrow <= 16 ? wgrad_warps<1> : wgrad_warps<2>);
            kernel<<<grid, threads, 0, stream>>>(is_k ? left : right, is_k ? right : left, groups, dw, width, narrow,
                                                 is_k ? k : 1, is_k ? 1 : k, accumulate);
        };
        dtype_d == FP32 ? launch(static_cast<float*>(d)) : launch(static_cast<T*>(d));
    } else {
        const bool few = narrow <= 16;
        const auto kernel = kind == DGRAD ? (few ? rows_kernel<true, 2> : rows_kernel<true, 4>)
                                          : (few ? rows_kernel<false, 2> : rows_kernel<false, 4>);
        const int64_t tiles = tiles_of_groups(rows, few ? side<2> : side<4>, experts);
        kernel<<<to_int(tiles, op_name, "tiles"), warps * 32, 0, stream>>>(left, right, groups, static_cast<T*>(d), width,
                                                                           narrow, static_cast<int>(experts));
    }
    check_launch(op_name);
}

}  // namespace surogate
