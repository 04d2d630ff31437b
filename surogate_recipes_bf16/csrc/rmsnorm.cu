// rmsnorm      rstd [T] = 1 / sqrt(mean_c(x[t, c]^2) + eps);  norm [T, C] = (x * rstd) * (w + offset)
// add_rmsnorm  residual_out [T, C] = x + residual, rounded to their dtype; norm and rstd of this rounded sum
//
// x, residual, residual_out, norm [T, C] and w [C] have one dtype, fp32 or bf16, and are row-major; rstd is fp32.
// Arithmetic is fp32; each output is written and rounded once. Pointers are aligned to their element. residual_out may
// be the same buffer as residual, because a thread reads an element before it writes it.
//
// If all pointers are aligned to 16 bytes and rows are a multiple of 16 bytes, a row is read once and kept in registers
// for the second pass. Grid: one warp per row up to 4 KiB (2048 columns in bf16, 1024 in fp32), otherwise one block per
// row, up to 64 KiB (32768, 16384). Longer or unaligned rows are read a second time, from L2.
//
// Bytes moved per element in bf16: 2 read + 2 written; add_rmsnorm 4 + 4; plus 4 per row. Expected: 80-90 % of
// bandwidth.
#include <surogate/dispatch.cuh>
#include <surogate/reduce.cuh>

#include "norms.h"

namespace surogate {
namespace {

constexpr int kRowsPerBlock = 4;  // in kernels with one warp per row

// Returns the sum over the threads of a row to each of them.
template <bool WarpRow>
__device__ __forceinline__ float row_sum(float value, float* scratch) {
    if constexpr (WarpRow) {
        return warp_sum(value);
    } else {
        return block_sum(value, scratch);
    }
}

// Loads x, or with Add computes the rounded sum and stores it.
template <class T, int N, bool Add>
__device__ __forceinline__ Vec<T, N> load_row(const T* x, const T* residual, T* residual_out, int64_t at) {
    using V = Vec<T, N>;
    V v = V::load(x + at);
    if constexpr (Add) {
        float a[N], b[N];
        v.to_float(a);
        V::load(residual + at).to_float(b);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            a[i] += b[i];
        }
        v = V::from_float(a);
        v.store(residual_out + at);
    }
    return v;
}

// Uses fmaf explicitly, because both ops, and a norm recomputed from its residual, must be bit-identical.
template <class T, int N>
__device__ __forceinline__ void add_squares(const Vec<T, N>& v, float& sum) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float value = to_float(v[i]);
        sum = fmaf(value, value, sum);
    }
}

template <class T, int N>
__device__ __forceinline__ void store_norm(const Vec<T, N>& v, float rstd, const T* w, float offset, T* norm) {
    float values[N], scale[N];
    v.to_float(values);
    Vec<T, N>::load(w).to_float(scale);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        values[i] = values[i] * rstd * (scale[i] + offset);
    }
    Vec<T, N>::from_float(values).store(norm);
}

__device__ __forceinline__ float rstd_of(float sum_of_squares, int columns, float eps) {
    return 1.0f / sqrtf(sum_of_squares / columns + eps);
}

// Held: number of vectors of a row that a thread keeps in registers.
template <class T, int N, int Held, bool WarpRow, bool Add>
__global__ void __launch_bounds__(WarpRow ? 32 * kRowsPerBlock : 1024)
    rmsnorm_kernel(const T* x, const T* residual, const T* w, T* norm, float* rstd_out, T* residual_out, int64_t rows,
                   int columns, float eps, float offset) {
    __shared__ float scratch[32];
    const int lane = WarpRow ? threadIdx.x % 32 : threadIdx.x;
    const int lanes = WarpRow ? 32 : blockDim.x;
    const int64_t row = WarpRow ? static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32 : blockIdx.x;
    if (row >= rows) {
        return;  // uniform over the warp; a block per row always has a row
    }
    const int vectors = columns / N;
    const int64_t start = row * columns;
    Vec<T, N> held[Held];
    float sum = 0;
#pragma unroll
    for (int k = 0; k < Held; ++k) {
        const int i = lane + k * lanes;
        if (i < vectors) {
            held[k] = load_row<T, N, Add>(x, residual, residual_out, start + static_cast<int64_t>(i) * N);
            add_squares(held[k], sum);
        }
    }
    const float rstd = rstd_of(row_sum<WarpRow>(sum, scratch), columns, eps);
    if (lane == 0) {
        rstd_out[row] = rstd;
    }
#pragma unroll
    for (int k = 0; k < Held; ++k) {
        const int i = lane + k * lanes;
        if (i < vectors) {
            const int64_t at = static_cast<int64_t>(i) * N;
            store_norm(held[k], rstd, w + at, offset, norm + start + at);
        }
    }
}

// For rows of any length and alignment: one block per row, which reads it twice.
template <class T, int N, bool Add>
__global__ void __launch_bounds__(1024)
    rmsnorm_any_kernel(const T* x, const T* residual, const T* w, T* norm, float* rstd_out, T* residual_out,
                       int columns, float eps, float offset) {
    __shared__ float scratch[32];
    const int vectors = columns / N;
    const int64_t start = static_cast<int64_t>(blockIdx.x) * columns;
    float sum = 0;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        add_squares(load_row<T, N, Add>(x, residual, residual_out, start + static_cast<int64_t>(i) * N), sum);
    }
    const float rstd = rstd_of(row_sum<false>(sum, scratch), columns, eps);
    if (threadIdx.x == 0) {
        rstd_out[blockIdx.x] = rstd;
    }
    const T* again = Add ? residual_out : x;  // the same thread wrote it
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        const int64_t at = start + static_cast<int64_t>(i) * N;
        store_norm(Vec<T, N>::load(again + at), rstd, w + static_cast<int64_t>(i) * N, offset, norm + at);
    }
}

template <class T, bool Add>
void launch(const T* x, const T* residual, const T* w, T* norm, float* rstd, T* residual_out, int64_t rows,
            int64_t columns_, float eps, float offset, const char* op, cudaStream_t stream) {
    constexpr int n = vector_width<T>;
    const int columns = to_int(columns_, op, "columns");
    const int blocks = to_int(rows, op, "rows");
    const bool wide = columns % n == 0 && all_aligned({x, residual, w, norm, residual_out});
    const int vectors = columns / n;
    const auto warp_row = [&](auto kernel) {
        kernel<<<static_cast<unsigned>(ceil_div(rows, kRowsPerBlock)), 32 * kRowsPerBlock, 0, stream>>>(
            x, residual, w, norm, rstd, residual_out, rows, columns, eps, offset);
    };
    const auto block_row = [&](auto kernel, int held) {
        const auto threads = static_cast<unsigned>(ceil_div(ceil_div(vectors, held), 32) * 32);
        kernel<<<blocks, threads, 0, stream>>>(x, residual, w, norm, rstd, residual_out, rows, columns, eps, offset);
    };
    const auto any_row = [&](auto kernel, int64_t units) {
        const auto threads = static_cast<unsigned>(units >= 1024 ? 1024 : ceil_div(units, 32) * 32);
        kernel<<<blocks, threads, 0, stream>>>(x, residual, w, norm, rstd, residual_out, columns, eps, offset);
    };
    if (!wide) {
        any_row(rmsnorm_any_kernel<T, 1, Add>, columns);
    } else if (vectors <= 2 * 32) {
        warp_row(rmsnorm_kernel<T, n, 2, true, Add>);
    } else if (vectors <= 4 * 32) {
        warp_row(rmsnorm_kernel<T, n, 4, true, Add>);
    } else if (vectors <= 8 * 32) {
        warp_row(rmsnorm_kernel<T, n, 8, true, Add>);
    } else if (vectors <= 2 * 1024) {
        block_row(rmsnorm_kernel<T, n, 2, false, Add>, 2);
    } else if (vectors <= 4 * 1024) {
        block_row(rmsnorm_kernel<T, n, 4, false, Add>, 4);
    } else {
        any_row(rmsnorm_any_kernel<T, n, Add>, vectors);
    }
    check_launch(op);
}

void check(const char* op, const void* x, const void* w, const void* norm, const void* rstd, int64_t rows,
           int64_t columns, int dtype) {
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    check_pointer(x, op, "x", bytes_of(dtype));
    check_pointer(w, op, "w", bytes_of(dtype));
    check_pointer(norm, op, "norm", bytes_of(dtype));
    check_pointer(rstd, op, "rstd", 4);
}

}  // namespace

void rmsnorm(const void* x, const void* w, void* norm, void* rstd, int64_t rows, int64_t columns, float eps,
             float offset, int dtype, cudaStream_t stream) {
    with_float_type(dtype, "rmsnorm", "x", [&](auto type) {
        using T = typename decltype(type)::type;
        check("rmsnorm", x, w, norm, rstd, rows, columns, dtype);
        launch<T, false>(static_cast<const T*>(x), nullptr, static_cast<const T*>(w), static_cast<T*>(norm),
                         static_cast<float*>(rstd), nullptr, rows, columns, eps, offset, "rmsnorm",
                         stream);
    });
}

void add_rmsnorm(const void* x, const void* residual, const void* w, void* norm, void* rstd, void* residual_out,
                 int64_t rows, int64_t columns, float eps, float offset, int dtype, cudaStream_t stream) {
    with_float_type(dtype, "add_rmsnorm", "x", [&](auto type) {
        using T = typename decltype(type)::type;
        check("add_rmsnorm", x, w, norm, rstd, rows, columns, dtype);
        check_pointer(residual, "add_rmsnorm", "residual", bytes_of(dtype));
        check_pointer(residual_out, "add_rmsnorm", "residual_out", bytes_of(dtype));
        launch<T, true>(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(w),
                        static_cast<T*>(norm), static_cast<float*>(rstd), static_cast<T*>(residual_out), rows, columns,
                        eps, offset, "add_rmsnorm", stream);
    });
}

}  // namespace surogate
