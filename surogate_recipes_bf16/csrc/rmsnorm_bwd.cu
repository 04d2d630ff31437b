// n[t, c] = x[t, c] * rstd[t],  g = dy * w:
//   dx [T, C] = rstd * (g - n * mean_c(g * n)) (+ dresidual)
//   dw [C]  (+)= sum_t dy * n
//
// dy, x, dresidual, dx [T, C] and w [C] have one dtype, fp32 or bf16, and are row-major; rstd is fp32 [T]; dresidual
// may be null. Arithmetic is fp32; each output is rounded once. dx is written and must not overlap an input. dw is fp32
// (written or accumulated into) or bf16 (written). Workspace: fp32 [min(T, P), C], P = 1024 below 2048 columns,
// otherwise 512; aligned to 16 bytes. Other pointers are aligned to their element.
//
// Stage 1: at most P blocks, independent of the GPU. Block b processes rows b, b + blocks, ... and accumulates its part
// of dw in registers, one partial row per block. Rows up to 1 KiB have one warp each, and the sums of the four warps of
// a block are added in order; longer rows have one block each. Rows that are unaligned or longer than 32 KiB (bf16) or
// 64 KiB (fp32) are read twice, and a separate pass computes dw (column_sum.cu). Stage 2 sums the partials in a fixed
// order.
//
// Bytes moved per element in bf16: 6 read + 2 written (4 + 2 without dresidual). The partials add 8 bytes per column
// and block, which is 6 % at T = 8192 and C >= 2048. Expected: 75-85 % of bandwidth.
#include <surogate/reduce.cuh>

#include <algorithm>

#include "column_sum.h"
#include "dispatch.cuh"
#include "norms.h"

namespace surogate {
namespace {

constexpr int kRowsPerBlock = 4;  // in kernels with one warp per row
constexpr int kMaxThreads = 1024;

// Maximum number of blocks of stage 1, independent of the GPU. Short rows need more blocks for the same number of bytes
// in flight.
int64_t max_blocks(int64_t columns) { return columns < 2048 ? 1024 : 512; }

// Returns v through an optimization barrier. The compiler then converts bf16 to float again at the second use, instead
// of keeping the floats, twice as many registers, across the reduction.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> packed(const Vec<T, N>& v) {
    uint32_t words[sizeof(v) / 4];
    memcpy(words, &v, sizeof(v));
#pragma unroll
    for (uint32_t& word : words) {
        asm("" : "+r"(word));
    }
    Vec<T, N> same;
    memcpy(&same, words, sizeof(v));
    return same;
}

// Held: number of vectors of a row that a thread keeps in registers. A thread has the same columns in every row.
template <class T, int N, int Held, bool WarpRow, bool Residual>
__global__ void __launch_bounds__(WarpRow ? 32 * kRowsPerBlock : kMaxThreads)
    rmsnorm_bwd_kernel(const T* dy, const T* x, const T* w, const float* rstd, const T* dresidual, T* dx,
                       float* partials, int64_t rows, int columns) {
    using V = Vec<T, N>;
    __shared__ float scratch[WarpRow ? Held * 32 * N : 32];
    const int lane = WarpRow ? threadIdx.x % 32 : threadIdx.x;
    const int lanes = WarpRow ? 32 : blockDim.x;
    const int warp = threadIdx.x / 32;
    const int vectors = columns / N;

    V weight[Held];
    float dw[Held][N] = {};
#pragma unroll
    for (int k = 0; k < Held; ++k) {
        if (lane + k * lanes < vectors) {
            weight[k] = V::load(w + static_cast<int64_t>(lane + k * lanes) * N);
        }
    }
    const int64_t first = WarpRow ? static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + warp : blockIdx.x;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * (WarpRow ? kRowsPerBlock : 1);
    for (int64_t row = first; row < rows; row += stride) {
        const int64_t start = row * columns;
        const float r = rstd[row];
        V dys[Held], xs[Held], rest[Held];
        float dot = 0;
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            if (lane + k * lanes < vectors) {
                const int64_t at = start + static_cast<int64_t>(lane + k * lanes) * N;
                dys[k] = V::load(dy + at);
                xs[k] = V::load(x + at);
                if constexpr (Residual) {
                    rest[k] = V::load(dresidual + at);
                }
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const float d = to_float(dys[k][i]), normed = to_float(xs[k][i]) * r;
                    dot += d * to_float(weight[k][i]) * normed;
                    dw[k][i] += d * normed;
                }
            }
        }
        dot = (WarpRow ? warp_sum(dot) : block_sum(dot, scratch)) / columns;
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            if (lane + k * lanes < vectors) {
                dys[k] = packed(dys[k]);
                xs[k] = packed(xs[k]);
                weight[k] = packed(weight[k]);
                float out[N];
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const float g = to_float(dys[k][i]) * to_float(weight[k][i]), normed = to_float(xs[k][i]) * r;
                    out[i] = (g - normed * dot) * r;
                    if constexpr (Residual) {
                        out[i] += to_float(rest[k][i]);
                    }
                }
                V::from_float(out).store(dx + start + static_cast<int64_t>(lane + k * lanes) * N);
            }
        }
    }

    float* mine = partials + static_cast<int64_t>(blockIdx.x) * columns;
    if constexpr (WarpRow) {
#pragma unroll 1
        for (int turn = 0; turn < kRowsPerBlock; ++turn) {
            if (warp == turn) {
#pragma unroll
                for (int k = 0; k < Held; ++k) {
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        float& total = scratch[(lane + k * 32) * N + i];
                        total = turn == 0 ? dw[k][i] : total + dw[k][i];
                    }
                }
            }
            __syncthreads();
        }
        for (int c = threadIdx.x; c < columns; c += blockDim.x) {
            mine[c] = scratch[c];
        }
    } else {
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            const int i = lane + k * lanes;
            if (i < vectors) {
#pragma unroll
                for (int j = 0; j < N; j += 4) {
                    const float four[4] = {dw[k][j], dw[k][j + 1], dw[k][j + 2], dw[k][j + 3]};
                    Vec<float, 4>::from_float(four).store(mine + static_cast<int64_t>(i) * N + j);
                }
            }
        }
    }
}

// dx for rows of any length and alignment: one block per row, which reads it twice.
template <class T, bool Residual>
__global__ void __launch_bounds__(1024)
    rmsnorm_dx_any_kernel(const T* dy, const T* x, const T* w, const float* rstd, const T* dresidual, T* dx,
                          int columns) {
    __shared__ float scratch[32];
    const int64_t start = static_cast<int64_t>(blockIdx.x) * columns;
    const float r = rstd[blockIdx.x];
    float dot = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        dot += to_float(dy[start + c]) * to_float(w[c]) * (to_float(x[start + c]) * r);
    }
    dot = block_sum(dot, scratch) / columns;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const float g = to_float(dy[start + c]) * to_float(w[c]), normed = to_float(x[start + c]) * r;
        float out = (g - normed * dot) * r;
        if constexpr (Residual) {
            out += to_float(dresidual[start + c]);
        }
        dx[start + c] = from_float<T>(out);
    }
}

struct Buffers {
    const void *dy, *x, *w, *rstd, *dresidual;
    void* dx;
    float* partials;
    int64_t rows;
    int columns;
};

// Enqueues stage 1 and returns the number of partial rows that it writes.
template <class T, bool Residual>
int64_t launch(const Buffers& b, int dtype, const char* op, cudaStream_t stream) {
    constexpr int n = vector_width<T>;
    const auto run = [&](auto kernel, int64_t blocks, int64_t threads) {
        kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream>>>(
            static_cast<const T*>(b.dy), static_cast<const T*>(b.x), static_cast<const T*>(b.w),
            static_cast<const float*>(b.rstd), static_cast<const T*>(b.dresidual), static_cast<T*>(b.dx), b.partials,
            b.rows, b.columns);
        check_launch(op);
        return blocks;
    };
    const auto warp_row = [&](auto kernel) {
        return run(kernel, std::min(max_blocks(b.columns), ceil_div(b.rows, kRowsPerBlock)), 32 * kRowsPerBlock);
    };
    const int vectors = b.columns / n;
    const auto block_row = [&](auto kernel, int held) {
        return run(kernel, std::min(max_blocks(b.columns), b.rows), ceil_div(ceil_div(vectors, held), 32) * 32);
    };
    if (b.columns % n == 0 && all_aligned({b.dy, b.x, b.w, b.dresidual, b.dx})) {
        if (vectors <= 2 * 32) {
            return warp_row(rmsnorm_bwd_kernel<T, n, 2, true, Residual>);
        }
        if (vectors <= kMaxThreads) {
            return block_row(rmsnorm_bwd_kernel<T, n, 1, false, Residual>, 1);
        }
        if (vectors <= 2 * kMaxThreads) {
            return block_row(rmsnorm_bwd_kernel<T, n, 2, false, Residual>, 2);
        }
        if constexpr (n == 4) {
            if (vectors <= 4 * kMaxThreads) {
                return block_row(rmsnorm_bwd_kernel<T, n, 4, false, Residual>, 4);
            }
        }
    }
    const int64_t threads = b.columns >= 1024 ? 1024 : ceil_div(b.columns, 32) * 32;
    rmsnorm_dx_any_kernel<T, Residual><<<to_int(b.rows, op, "rows"), static_cast<unsigned>(threads), 0, stream>>>(
        static_cast<const T*>(b.dy), static_cast<const T*>(b.x), static_cast<const T*>(b.w),
        static_cast<const float*>(b.rstd), static_cast<const T*>(b.dresidual), static_cast<T*>(b.dx), b.columns);
    check_launch(op);
    column_partials(b.dy, b.x, b.rstd, b.partials, b.rows, b.columns, dtype, op, stream);
    return column_slabs(b.rows);
}

}  // namespace

void rmsnorm_bwd(const void* dy, const void* x, const void* w, const void* rstd, const void* dresidual, void* dx,
                 void* dw, void* workspace, int64_t workspace_bytes, int64_t rows, int64_t columns, bool accumulate_dw,
                 int dtype, int dtype_dw, cudaStream_t stream) {
    constexpr const char* op = "rmsnorm_bwd";
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    check_pointer(dy, op, "dy", bytes_of(dtype));
    check_pointer(x, op, "x", bytes_of(dtype));
    check_pointer(w, op, "w", bytes_of(dtype));
    check_pointer(dx, op, "dx", bytes_of(dtype));
    if (dresidual != nullptr) {
        check_pointer(dresidual, op, "dresidual", bytes_of(dtype));
    }
    check_pointer(rstd, op, "rstd", 4);
    check_pointer(dw, op, "dw", bytes_of(dtype_dw));
    check_pointer(workspace, op, "workspace", 16);
    check_accumulate(accumulate_dw, dtype_dw, op);
    const int64_t needed = std::min(rows, max_blocks(columns)) * columns * 4;
    SUROGATE_REQUIRE(workspace_bytes >= needed, op,
                     "workspace needs " + std::to_string(needed) + " bytes, got " + std::to_string(workspace_bytes));
    const Buffers buffers{dy, x, w, rstd, dresidual, dx, static_cast<float*>(workspace), rows,
                          to_int(columns, op, "columns")};
    int64_t partials = 0;
    with_float_type(dtype, op, "x", [&](auto type) {
        using T = typename decltype(type)::type;
        partials = dresidual == nullptr ? launch<T, false>(buffers, dtype, op, stream)
                                        : launch<T, true>(buffers, dtype, op, stream);
    });
    sum_partials(buffers.partials, partials, columns, dw, accumulate_dw, dtype_dw, op, stream);
}

}  // namespace surogate
