// Products of experts whose weights have at most 32 columns on one side, by mma.sync, for SM80 and later; grouped_gemm.h
// describes the operands:
//
//   forward   y [rows,n] = x w_e^T, n narrow        wgrad   dw_e [n,k] = dy_e^T x_e, n or k narrow
//   dgrad     dx [rows,k] = dy w_e, k narrow
//
// Their time is that of reading the wide operand once, from memory straight to the registers that mma.sync reads: a sum has
// its terms in any order, and a result its columns, so each lane loads 16 bytes of a row, and two lanes need nothing of each
// other. No warp waits for another one before the end.
//
// Forward and dgrad: a block has 32 rows, or 16 where more than 16 columns are narrow, and its warps share the terms: of 256
// terms, 512 bytes of each row, a warp has 32. Their sums are added in order. Grid: rows / side + experts.
//
// wgrad: a warp has 64 columns of the wide operand and the rows of an expert, which 2 to 8 warps share where there are more
// than 255: routers may choose a few experts for all tokens. Then as many blocks share the columns of one. Grid: (columns / 512,
// rows / 128 + experts). Experts without rows get zeros.
//
// Sums are fp32 in one order, so results repeat. What lies outside of an expert, or of its matrix, is 0 and is not read.
//
// Bytes of Qwen3-30B-A3B with rank 16, 16,384 rows: x A^T of gate and up 76 MB, of down 29, dy B 57 and 76: 71 us at 3.35 TB/s.
// Gradients of A and B in fp32, which they read too where they accumulate, 84 to 101 and 31 to 38, 63 to 76 and 84 to 101: 78
// to 94 us. FLOPs: 0.4 to 1.1e9 each. On an H100, where a copy moves 2.87 TB/s (2026-11-26, even routes): 32, 14, 24 and 32 us,
// and gradients that accumulate 44, 20, 30 and 42, where tiles of 128 x 256 take 60, 30, 48, 60, 113, 47, 87 and 112. With all
// rows on 8 experts 94 and 105 us in place of 128 and 145.
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
    return exists ? load_once<Words>(from) : Words{};
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
    if (group.tile * side<Octets> >= group.rows) {
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
                const T* from = matrix + static_cast<int64_t>(column) * terms + t;
                const bool exists = column < width && t < terms;
                const Words words = exists ? Words::load(reinterpret_cast<const uint32_t*>(from)) : Words{};
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
constexpr int own_rows = 128;    // with twice as many, two warps share them

// 8 elements `stride` apart.
template <class D>
__device__ __forceinline__ void read(const D* d, int64_t stride, float (&out)[octet]) {
    using Half = Vec<D, octet / 2>;
    if (stride == 1) {
        const Half low = Half::load(d), high = Half::load(d + Half::size);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            out[i] = to_float(i < Half::size ? low[i % Half::size] : high[i % Half::size]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            out[i] = to_float(d[i * stride]);
        }
    }
}

template <class D>
__device__ __forceinline__ void write(D* d, int64_t stride, const float (&sums)[octet]) {
    if (stride == 1) {
        const float low[] = {sums[0], sums[1], sums[2], sums[3]}, high[] = {sums[4], sums[5], sums[6], sums[7]};
        Vec<D, 4>::from_float(low).store(d);
        Vec<D, 4>::from_float(high).store(d + 4);
    } else {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            d[i * stride] = from_float<D>(sums[i]);
        }
    }
}

// Element (column of wide, column of narrow) of an expert is at their products with the strides. Blocks: of 16 columns of
// narrow.
template <int Blocks, class D>
__global__ void __launch_bounds__(wgrad_warps<Blocks> * 32, 3)
    wgrad_kernel(const T* wide, const T* narrow, const int32_t* ends, D* dw, int width, int width_narrow, int64_t stride,
                 int64_t stride_narrow, int experts, bool accumulate) {
    constexpr int warps = wgrad_warps<Blocks>;
    __shared__ float partial[warps][Blocks * octet * 4][32];
    const Group group = group_of<own_rows>(ends, experts, static_cast<int>(blockIdx.y));
    int sharing = 1;  // warps that share rows, and blocks that share the columns of one
    while (sharing < warps && sharing * 2 * own_rows <= group.rows) {
        sharing *= 2;
    }
    if (group.tile >= sharing || (group.rows == 0 && accumulate)) {
        return;
    }
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    const int quad = lane / 4, part = lane % 4, turn = warp % sharing;
    const int first = ((static_cast<int>(blockIdx.x) * sharing + group.tile) * warps + warp) / sharing * own_columns;
    const int64_t start = group.start;

    float sums[Blocks][4][octet] = {};  // of each of the columns of each lane
    for (int at = turn * step_rows; at < group.rows; at += sharing * step_rows) {
        Words part_wide[2][2];  // rows, rows + 8, of two rows one below the other
        uint32_t part_narrow[Blocks][4];  // columns, columns + 8, then the next 8 rows
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = at + half * 8 + part * 2 + i, column = first + quad * octet;
                part_wide[half][i] = load_words(wide + (start + row) * width + column, row < group.rows && column < width);
            }
            const int row = at + half * 8 + quad;
#pragma unroll
            for (int i = 0; i < Blocks * 2; ++i) {
                const int column = i * octet + part * 2;
                part_narrow[i / 2][half * 2 + i % 2] =
                    load_word(narrow + (start + row) * width_narrow + column, row < group.rows && column < width_narrow);
            }
        }
#pragma unroll
        for (int block = 0; block < Blocks; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                part_narrow[block][i] = transposed(part_narrow[block][i]);
            }
        }
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            const unsigned halves = i % 2 == 0 ? 0x5410 : 0x7632;  // of a word of each of the two rows
            const uint32_t low = __byte_perm(part_wide[0][0][i / 2], part_wide[0][1][i / 2], halves);
            const uint32_t high = __byte_perm(part_wide[1][0][i / 2], part_wide[1][1][i / 2], halves);
#pragma unroll
            for (int block = 0; block < Blocks; ++block) {
                float own[4] = {sums[block][0][i], sums[block][1][i], sums[block][2][i], sums[block][3][i]};
                multiply_add(own, part_narrow[block], low, high);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    sums[block][j][i] = own[j];
                }
            }
        }
    }

    const auto each = [&](auto&& call) {
#pragma unroll
        for (int i = 0; i < Blocks * 4 * octet; ++i) {
            call(i, sums[i / (4 * octet)][i / octet % 4][i % octet]);
        }
    };
    if (sharing > 1) {
        each([&](int i, float sum) { partial[warp][i][lane] = sum; });
        __syncthreads();
        if (turn > 0) {
            return;
        }
        for (int other = warp + 1; other < warp + sharing; ++other) {
            each([&](int i, float& sum) { sum += partial[other][i][lane]; });
        }
    }

    D* matrix = dw + static_cast<int64_t>(group.expert) * width * width_narrow;
    float old[Blocks][4][octet] = {};  // all are read before the first one is written
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
        for (int i = 0; i < Blocks * 4; ++i) {
            const int column = first + (part * 2 + i % 2) * octet, column_narrow = i / 4 * 16 + i % 4 / 2 * 8 + quad;
            D* to = matrix + column * stride + column_narrow * stride_narrow;
            if (column >= width || column_narrow >= width_narrow || (pass == 0 && !accumulate)) {
                continue;
            }
            float(&of)[octet] = old[i / 4][i % 4];
            if (pass == 0) {
                read(to, stride, of);
            } else {
#pragma unroll
                for (int j = 0; j < octet; ++j) {
                    of[j] += sums[i / 4][i % 4][j];
                }
                write(to, stride, of);
            }
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
        const int64_t tiles = tiles_of_groups(rows, own_rows, experts);
        SUROGATE_REQUIRE(tiles <= 65535, op_name, "too many rows, got " + std::to_string(rows));
        const int across = own_columns * (narrow <= 16 ? wgrad_warps<1> : wgrad_warps<2>);  // columns of a block
        const dim3 grid(static_cast<unsigned>(ceil_div(width, across)), static_cast<unsigned>(tiles));
        const auto launch = [&](auto* dw) {
            using D = std::remove_pointer_t<decltype(dw)>;
            const auto kernel = narrow <= 16 ? wgrad_kernel<1, D> : wgrad_kernel<2, D>;
            kernel<<<grid, across / own_columns * 32, 0, stream>>>(is_k ? left : right, is_k ? right : left, groups, dw, width,
                                                                   narrow, is_k ? k : 1, is_k ? 1 : k,
                                                                   static_cast<int>(experts), accumulate);
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
