// Products of the experts of a layer by mma.sync, for SM80 and later; grouped_gemm.h describes the operands:
//
//   forward   y [rows,n] = x w_e^T        dgrad   dx [rows,k] = dy w_e        wgrad   dw_e [n,k] = dy_e^T x_e
//
// All are tiles of 128 x 128 of A B with terms of 32 at a time, which 3 stages of 16 KB hold in shared memory: A is stored as
// [terms,128] in wgrad, and B as [terms,128] in dgrad and wgrad (ldmatrix transposes), else with the terms last. Eight warps
// have 64 x 32 each. Sums are fp32 in one order, so results repeat. What lies outside of an expert, or of its matrix, is
// filled with zeros and not read.
//
// Grid: forward and dgrad (columns / 128, rows / 128 + experts): as many tiles as rows can have whatever the routes are; a
// block finds its expert from `ends`, and blocks too many return. wgrad (tiles of [n,k], experts).
//
// FLOPs: 2 rows n k. Expected: half of cuBLASLt's rate on an H200, which has wgmma for this, and three quarters on SM80 to
// SM89 and SM120.
#include <cuda_runtime.h>

#include <string>

#include "grouped_gemm.h"
#include "grouped_mma.h"
#include "groups.cuh"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/mma.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

using T = __nv_bfloat16;
constexpr int threads = 256;
constexpr int side = 128;   // of a tile
constexpr int terms = 32;   // of a step
constexpr int stages = 3;
constexpr int chunk = 8;    // elements in 16 bytes
constexpr int chunks = side * terms / chunk;  // of an operand in a stage

// An operand: rows and columns exist from 0 to these limits.
struct Matrix {
    const T* data;
    int64_t stride;
    int rows, columns;
};

// Where a chunk of row `row` is in a stage of rows of `Columns` elements, so that eight rows of ldmatrix use all banks.
template <int Columns>
__device__ __forceinline__ int position(int row, int column_chunk) {
    constexpr int of_row = Columns / chunk;
    return row * of_row + (column_chunk ^ (of_row == 4 ? row / 2 % 4 : row % 8));
}

// Copies rows and columns from (row, column) on to a stage, of [128,32] or [32,128] elements.
template <int Columns>
__device__ __forceinline__ void load(uint4* stage, const Matrix& m, int row, int column) {
    constexpr int of_row = Columns / chunk;
#pragma unroll
    for (int i = 0; i < chunks / threads; ++i) {
        const int index = static_cast<int>(threadIdx.x) + i * threads;
        const int r = index / of_row, c = index % of_row;
        const bool exists = row + r < m.rows && column + c * chunk < m.columns;
        const T* from = exists ? m.data + (row + r) * m.stride + column + c * chunk : m.data;
        copy_async(stage + position<Columns>(r, c), from, exists);
    }
}

// d [m,n] = A B + bias [n] or += from row `row` and column `column` on, a tile. A is stored as [m,length], transposed as [length,m];
// B as [n,length], transposed as [length,n].
template <bool TransposedA, bool TransposedB, class D>
__device__ __forceinline__ void multiply(const Matrix& a, const Matrix& b, D* d, int64_t stride, int m, int n, int length,
                                         int row, int column, bool accumulate, const T* bias = nullptr) {
    constexpr int columns_a = TransposedA ? side : terms, columns_b = TransposedB ? side : terms;
    __shared__ uint4 tiles_a[stages][chunks];
    __shared__ uint4 tiles_b[stages][chunks];
    const auto copy = [&](int step) {
        const int at = step * terms;
        load<columns_a>(tiles_a[step % stages], a, TransposedA ? at : row, TransposedA ? row : at);
        load<columns_b>(tiles_b[step % stages], b, TransposedB ? at : column, TransposedB ? column : at);
    };
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int own_row = warp / 4 * 64, own_column = warp % 4 * 32;  // of the tile
    const int low = lane / 8 % 2, high = lane / 16;                 // of the four matrices of ldmatrix: 0 or 1
    float sums[4][4][4] = {};

    const int steps = (length + terms - 1) / terms;
#pragma unroll
    for (int step = 0; step < stages - 1; ++step) {
        if (step < steps) {
            copy(step);
        }
        commit_copies();
    }
    for (int step = 0; step < steps; ++step) {
        wait_copies<stages - 2>();
        __syncthreads();
        if (step + stages - 1 < steps) {
            copy(step + stages - 1);
        }
        commit_copies();
        const uint4* stage_a = tiles_a[step % stages];
        const uint4* stage_b = tiles_b[step % stages];
#pragma unroll
        for (int half = 0; half < terms / 16; ++half) {
            uint32_t part_a[4][4], part_b[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // matrices: rows, rows + 8, then the next 8 terms
                const int at = own_row + i * 16;
                const int from = TransposedA
                                     ? position<columns_a>(half * 16 + high * 8 + lane % 8, at / chunk + low)
                                     : position<columns_a>(at + low * 8 + lane % 8, half * 2 + high);
                load_matrices<TransposedA>(part_a[i], stage_a + from);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {  // matrices: terms, the next 8 terms, then columns + 8
                const int at = own_column + j * 16;
                const int from = TransposedB
                                     ? position<columns_b>(half * 16 + low * 8 + lane % 8, at / chunk + high)
                                     : position<columns_b>(at + high * 8 + lane % 8, half * 2 + low);
                load_matrices<TransposedB>(part_b[j], stage_b + from);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    multiply_add(sums[i][j], part_a[i], part_b[j / 2][j % 2 * 2], part_b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }
    wait_copies<0>();

    using Pair = Vec<D, 2>;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = row + own_row + i * 16 + half * 8 + lane / 4;
                const int c = column + own_column + j * 8 + lane % 4 * 2;
                if (r < m && c < n) {
                    D* to = d + r * stride + c;
                    float pair[2] = {sums[i][j][half * 2], sums[i][j][half * 2 + 1]};
                    if (bias != nullptr) {
                        pair[0] += to_float(bias[c]);
                        pair[1] += to_float(bias[c + 1]);
                    }
                    if (accumulate) {
                        const Pair old = Pair::load(to);
                        pair[0] += to_float(old[0]);
                        pair[1] += to_float(old[1]);
                    }
                    Pair::from_float(pair).store(to);
                }
            }
        }
    }
}

template <bool Dgrad>
__global__ void __launch_bounds__(threads, 2)
    rows_kernel(const T* x, const T* w, const int32_t* ends, const T* bias, T* y, int n, int k, int experts, int begin) {
    const Group group = group_of<side>(ends, experts, static_cast<int>(blockIdx.y), begin);
    if (group.tile * side >= group.rows) {
        return;
    }
    const int in = Dgrad ? n : k, out = Dgrad ? k : n;
    const T* matrix = w + static_cast<int64_t>(group.expert) * n * k;
    multiply<false, Dgrad>({x + static_cast<int64_t>(group.start) * in, in, group.rows, in}, {matrix, k, n, k},
                           y + static_cast<int64_t>(group.start) * out, out, group.rows, out, in, group.tile * side,
                           static_cast<int>(blockIdx.x) * side, false,
                           bias == nullptr ? bias : bias + static_cast<int64_t>(begin + group.expert) * n);
}

template <class D>
__global__ void __launch_bounds__(threads, 2)
    wgrad_kernel(const T* dy, const T* x, const int32_t* ends, D* dw, int n, int k, int across, bool accumulate) {
    const int e = static_cast<int>(blockIdx.y), tile = static_cast<int>(blockIdx.x);
    const int start = e == 0 ? 0 : ends[e - 1], rows = ends[e] - start;
    if (rows == 0 && accumulate) {
        return;
    }
    multiply<true, true>({dy + static_cast<int64_t>(start) * n, n, rows, n}, {x + static_cast<int64_t>(start) * k, k, rows, k},
                         dw + static_cast<int64_t>(e) * n * k, k, n, k, rows, tile / across * side, tile % across * side,
                         accumulate);
}

}  // namespace

void grouped_mma(const void* a, const void* b, const void* ends, const void* bias, void* d, int64_t rows, int64_t n, int64_t k,
                 int64_t experts, int kind, int dtype_d, bool accumulate, int64_t begin, int64_t of, cudaStream_t stream) {
    check_grouped({rows, n, k, experts, kind, dtype_d, accumulate, 0, begin, of}, a, b, ends, d);
    SUROGATE_REQUIRE(bias == nullptr || kind == FORWARD, "grouped_mma", "only a forward product adds a bias");
    const T* row = static_cast<const T*>(bias);
    const int from = static_cast<int>(begin);
    const int32_t* groups = static_cast<const int32_t*>(ends);
    const T *left = static_cast<const T*>(a), *right = static_cast<const T*>(b);
    const int n_ = static_cast<int>(n), k_ = static_cast<int>(k), e = static_cast<int>(experts);
    if (kind == WGRAD) {
        const int across = static_cast<int>(ceil_div(k, side));
        const dim3 grid(to_int(across * ceil_div(n, side), "grouped_mma", "tiles"), static_cast<unsigned>(e));
        if (dtype_d == FP32) {
            float* dw = static_cast<float*>(d);
            wgrad_kernel<<<grid, threads, 0, stream>>>(left, right, groups, dw, n_, k_, across, accumulate);
        } else {
            T* dw = static_cast<T*>(d);
            wgrad_kernel<<<grid, threads, 0, stream>>>(left, right, groups, dw, n_, k_, across, false);
        }
    } else {
        const int64_t tiles = tiles_of_groups(rows, side, experts);
        SUROGATE_REQUIRE(tiles <= 65535, "grouped_mma", "too many rows, got " + std::to_string(rows));
        const auto grid = [&](int64_t width) {
            return dim3(static_cast<unsigned>(ceil_div(width, side)), static_cast<unsigned>(tiles));
        };
        T* out = static_cast<T*>(d);
        if (kind == DGRAD) {
            rows_kernel<true><<<grid(k), threads, 0, stream>>>(left, right, groups, row, out, n_, k_, e, from);
        } else {
            rows_kernel<false><<<grid(n), threads, 0, stream>>>(left, right, groups, row, out, n_, k_, e, from);
        }
    }
    check_launch("grouped_mma");
}

}  // namespace surogate
