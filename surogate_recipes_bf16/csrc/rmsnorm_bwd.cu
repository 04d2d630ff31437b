// n[t, c] = x[t, c] * rstd[t],  g = dy * (w + offset):
//   dx [T, C] = rstd * (g - n * mean_c(g * n)) (+ dresidual)
//   dw [C]  (+)= sum_t dy * n
//   norm [T, C] = n * (w + offset), with the bits of rmsnorm; not computed if the pointer is null
//
// rmsnorm_dgrad computes dx, and norm, alone.
//
// dy, x, dresidual, dx, norm [T, C] and w [C] have one dtype, fp32 or bf16, and are row-major; rstd is fp32 [T]; dresidual
// may be null. Arithmetic is fp32; each output is rounded once. dx and norm are written and must not overlap an input,
// except that in rmsnorm_dgrad dx may be the same buffer as dy, and norm the same as x. dw is fp32 (written or accumulated into) or bf16 (written).
// Workspace: fp32 [min(T, 512), C], aligned to 16 bytes; none without dw. Other pointers are aligned to their element.
//
// Stage 1: with dw, at most 512 blocks, independent of the GPU. Block b processes rows b, b + blocks, ... and accumulates
// its part of dw in registers, one partial row per block. Rows up to 2 KiB have one warp each, and the sums of the four
// warps of a block are added in order; longer rows have one block each, up to 32 KiB. A thread loads all its vectors of a
// row before it uses them. Rows that are unaligned or longer are read twice, and a separate pass computes dw
// (column_sum.cu). Stage 2 sums the partials in a fixed order.
//
// Bytes moved per element in bf16: 6 read + 2 written (4 + 2 without dresidual), and 2 more with norm. The partials add 8 bytes per column
// and block, which is 6 % at T = 8192. Of an H200's 4.26 TB/s, rmsnorm_dgrad reaches 95 % at 8,192 x 4,096 (66 us) and
// 87 % at 4,096 x 4,096 (36 us); with dw 85 % and 74 %.
#include <surogate/dispatch.cuh>
#include <surogate/reduce.cuh>
#include <surogate/rmsnorm_dx.cuh>
#include <surogate/sum_partials.cuh>

#include <algorithm>

#include "column_sum.h"
#include "norms.h"

namespace surogate {
namespace {

constexpr int kRowsPerBlock = 4;  // in kernels with one warp per row
constexpr int kMaxThreads = 512;

// Maximum number of blocks of stage 1, independent of the GPU: they fill the largest GPUs.
constexpr int64_t kMaxBlocks = 512;

// Sum over the threads of a row, the same on each of them. `scratch` has two halves, used in turn, so that one barrier
// per row suffices.
template <bool WarpRow>
__device__ __forceinline__ float row_sum(float value, float (&scratch)[2][kMaxThreads / 32], bool& half) {
    value = warp_sum(value);
    if constexpr (WarpRow) {
        return value;
    }
    if (threadIdx.x % 32 == 0) {
        scratch[half][threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = scratch[half][0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x / 32); ++warp) {
        value += scratch[half][warp];
    }
    half = !half;
    return value;
}

// Held: number of vectors of a row that a thread keeps in registers. A thread has the same columns in every row. Without
// HasDw, partials are not written, and without HasNorm, norm is not.
template <class T, int N, int Held, bool WarpRow, bool Residual, bool HasDw, bool HasNorm>
__global__ void __launch_bounds__(WarpRow ? 32 * kRowsPerBlock : kMaxThreads)
    rmsnorm_bwd_kernel(const T* dy, const T* x, const T* w, const float* rstd, const T* dresidual, T* dx, T* norm,
                       float* partials, int64_t rows, int columns, float offset) {
    using V = Packed<T, N>;
    __shared__ float scratch[2][kMaxThreads / 32];
    __shared__ float total[WarpRow && HasDw ? Held * 32 * N : 1];
    const int lane = WarpRow ? threadIdx.x % 32 : threadIdx.x;
    const int lanes = WarpRow ? 32 : blockDim.x;
    const int warp = threadIdx.x / 32;
    const int vectors = columns / N;
    bool half = false;

    V weight[Held];
    float dw[Held][N] = {};
#pragma unroll
    for (int k = 0; k < Held; ++k) {
        if (lane + k * lanes < vectors) {
            weight[k] = V::load(w + (lane + k * lanes) * N);
        }
    }
    const int64_t first = WarpRow ? static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + warp : blockIdx.x;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * (WarpRow ? kRowsPerBlock : 1);
    for (int64_t row = first; row < rows; row += stride) {
        const int64_t start = row * columns + lane * N;
        const float r = rstd[row];
        V dys[Held], xs[Held], rest[Held];
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            if (lane + k * lanes < vectors) {
                dys[k] = V::load(dy + start + k * lanes * N);
                xs[k] = V::load(x + start + k * lanes * N);
                if constexpr (Residual) {
                    rest[k] = V::load(dresidual + start + k * lanes * N);
                }
            }
        }
        const auto to_floats = [&](int k, float (&d)[N], float (&v)[N], float (&scale)[N]) {
            dys[k].to_float(d);
            xs[k].to_float(v);
            weight[k].to_float(scale);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                scale[i] += offset;
            }
        };
        float dot = 0;
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            if (lane + k * lanes < vectors) {
                float d[N], v[N], scale[N];
                to_floats(k, d, v, scale);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const NormElement element{d[i], scale[i], v[i], r};
                    dot = element.add_to(dot);
                    if constexpr (HasDw) {
                        dw[k][i] += d[i] * element.normed();
                    }
                }
            }
        }
        dot = row_sum<WarpRow>(dot, scratch, half) / columns;
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            if (lane + k * lanes < vectors) {
                float d[N], v[N], scale[N];
                to_floats(k, d, v, scale);
                float other[N] = {};
                if constexpr (Residual) {
                    rest[k].to_float(other);
                }
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const NormElement element{d[i], scale[i], v[i], r};
                    d[i] = Residual ? element.dx(dot, other[i]) : element.dx(dot);
                    v[i] = element.norm();
                }
                V::from_float(d).store(dx + start + k * lanes * N);
                if constexpr (HasNorm) {
                    V::from_float(v).store(norm + start + k * lanes * N);
                }
            }
        }
    }

    float* mine = partials + static_cast<int64_t>(blockIdx.x) * columns;
    if constexpr (HasDw && WarpRow) {
#pragma unroll 1
        for (int turn = 0; turn < kRowsPerBlock; ++turn) {
            if (warp == turn) {
#pragma unroll
                for (int k = 0; k < Held; ++k) {
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        float& sum = total[(lane + k * 32) * N + i];
                        sum = turn == 0 ? dw[k][i] : sum + dw[k][i];
                    }
                }
            }
            __syncthreads();
        }
        for (int c = threadIdx.x; c < columns; c += blockDim.x) {
            mine[c] = total[c];
        }
    } else if constexpr (HasDw) {
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
    rmsnorm_dx_any_kernel(const T* dy, const T* x, const T* w, const float* rstd, const T* dresidual, T* dx, T* norm,
                          int columns, float offset) {
    __shared__ float scratch[32];
    const int64_t start = static_cast<int64_t>(blockIdx.x) * columns;
    const float r = rstd[blockIdx.x];
    float dot = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        dot = NormElement{to_float(dy[start + c]), to_float(w[c]) + offset, to_float(x[start + c]), r}.add_to(dot);
    }
    dot = block_sum(dot, scratch) / columns;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const NormElement element{to_float(dy[start + c]), to_float(w[c]) + offset, to_float(x[start + c]), r};
        const float out = Residual ? element.dx(dot, to_float(dresidual[start + c])) : element.dx(dot);
        dx[start + c] = from_float<T>(out);
        if (norm != nullptr) {
            norm[start + c] = from_float<T>(element.norm());
        }
    }
}

struct Buffers {
    const void *dy, *x, *w, *rstd, *dresidual;
    void* dx;
    void* norm;       // null: not computed
    float* partials;  // null: no dw
    int64_t rows;
    int columns;
    float offset;
};

// Enqueues stage 1 and returns the number of partial rows that it writes.
template <class T, bool Residual, bool HasDw, bool HasNorm>
int64_t launch(const Buffers& b, int dtype, const char* op, cudaStream_t stream) {
    constexpr int n = vector_width<T>;
    const auto run = [&](auto kernel, int64_t rows_per_block, int64_t threads) {
        const int64_t needed = ceil_div(b.rows, rows_per_block);
        const int64_t blocks = HasDw ? std::min(kMaxBlocks, needed) : needed;
        kernel<<<to_int(blocks, op, "rows"), static_cast<unsigned>(threads), 0, stream>>>(
            static_cast<const T*>(b.dy), static_cast<const T*>(b.x), static_cast<const T*>(b.w),
            static_cast<const float*>(b.rstd), static_cast<const T*>(b.dresidual), static_cast<T*>(b.dx),
            static_cast<T*>(b.norm), b.partials, b.rows, b.columns, b.offset);
        check_launch(op);
        return blocks;
    };
    const int64_t vectors = b.columns / n;
    if (b.columns % n == 0 && all_aligned({b.dy, b.x, b.w, b.dresidual, b.dx, b.norm}) && vectors <= 4 * kMaxThreads) {
        if (vectors <= 4 * 32) {
            return run(rmsnorm_bwd_kernel<T, n, 4, true, Residual, HasDw, HasNorm>, kRowsPerBlock, 32 * kRowsPerBlock);
        }
        if (vectors <= 2 * 128) {
            return run(rmsnorm_bwd_kernel<T, n, 2, false, Residual, HasDw, HasNorm>, 1, 128);
        }
        return run(rmsnorm_bwd_kernel<T, n, 4, false, Residual, HasDw, HasNorm>, 1, ceil_div(ceil_div(vectors, 4), 32) * 32);
    }
    const int64_t any_threads = b.columns >= 1024 ? 1024 : ceil_div(b.columns, 32) * 32;
    rmsnorm_dx_any_kernel<T, Residual><<<to_int(b.rows, op, "rows"), static_cast<unsigned>(any_threads), 0, stream>>>(
        static_cast<const T*>(b.dy), static_cast<const T*>(b.x), static_cast<const T*>(b.w),
        static_cast<const float*>(b.rstd), static_cast<const T*>(b.dresidual), static_cast<T*>(b.dx),
        static_cast<T*>(b.norm), b.columns, b.offset);
    check_launch(op);
    if (!HasDw) {
        return 0;
    }
    column_partials(b.dy, b.x, b.rstd, b.partials, b.rows, b.columns, dtype, op, stream);
    return column_slabs(b.rows);
}

template <class T, bool Residual, bool HasDw>
int64_t launch(const Buffers& b, int dtype, const char* op, cudaStream_t stream) {
    return b.norm == nullptr ? launch<T, Residual, HasDw, false>(b, dtype, op, stream)
                             : launch<T, Residual, HasDw, true>(b, dtype, op, stream);
}

int64_t stage_1(const Buffers& b, int dtype, const char* op, cudaStream_t stream) {
    check_positive(b.rows, op, "rows");
    check_pointer(b.dy, op, "dy", bytes_of(dtype));
    check_pointer(b.x, op, "x", bytes_of(dtype));
    check_pointer(b.w, op, "w", bytes_of(dtype));
    check_pointer(b.dx, op, "dx", bytes_of(dtype));
    if (b.dresidual != nullptr) {
        check_pointer(b.dresidual, op, "dresidual", bytes_of(dtype));
    }
    if (b.norm != nullptr) {
        check_pointer(b.norm, op, "norm", bytes_of(dtype));
    }
    check_pointer(b.rstd, op, "rstd", 4);
    int64_t partials = 0;
    with_float_type(dtype, op, "x", [&](auto type) {
        using T = typename decltype(type)::type;
        const auto launch_typed = b.partials == nullptr
                                      ? (b.dresidual == nullptr ? launch<T, false, false> : launch<T, true, false>)
                                      : (b.dresidual == nullptr ? launch<T, false, true> : launch<T, true, true>);
        partials = launch_typed(b, dtype, op, stream);
    });
    return partials;
}

}  // namespace

void rmsnorm_bwd(const void* dy, const void* x, const void* w, const void* rstd, const void* dresidual, void* dx,
                 void* dw, void* norm, void* workspace, int64_t workspace_bytes, int64_t rows, int64_t columns,
                 float offset, bool accumulate_dw, int dtype, int dtype_dw, cudaStream_t stream) {
    constexpr const char* op = "rmsnorm_bwd";
    check_positive(columns, op, "columns");
    check_pointer(dw, op, "dw", bytes_of(dtype_dw));
    check_pointer(workspace, op, "workspace", 16);
    check_accumulate(accumulate_dw, dtype_dw, op);
    const int64_t needed = std::min(rows, kMaxBlocks) * columns * 4;
    SUROGATE_REQUIRE(workspace_bytes >= needed, op,
                     "workspace needs " + std::to_string(needed) + " bytes, got " + std::to_string(workspace_bytes));
    const Buffers buffers{dy,   x,    w,                               rstd, dresidual,
                          dx,   norm, static_cast<float*>(workspace), rows, to_int(columns, op, "columns"),
                          offset};
    const int64_t partials = stage_1(buffers, dtype, op, stream);
    sum_partials(buffers.partials, partials, columns, dw, accumulate_dw, dtype_dw, op, stream);
}

void rmsnorm_dgrad(const void* dy, const void* x, const void* w, const void* rstd, const void* dresidual, void* dx,
                   void* norm, int64_t rows, int64_t columns, float offset, int dtype, cudaStream_t stream) {
    constexpr const char* op = "rmsnorm_dgrad";
    check_positive(columns, op, "columns");
    stage_1({dy, x, w, rstd, dresidual, dx, norm, nullptr, rows, to_int(columns, op, "columns"), offset}, dtype, op,
            stream);
}

}  // namespace surogate
