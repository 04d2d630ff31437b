// residual_out [T, C] = residual + rmsnorm(y, post_w), the norm and the sum rounded to their dtype
// rstd [T] = 1 / sqrt(mean_c(residual_out[t, c]^2) + eps);  norm [T, C] = (residual_out * rstd) * (w + offset)
//
// These are the bits of rmsnorm, then add_rmsnorm, which share the arithmetic and the grid (rmsnorm_rows.cuh).
//
// y, residual, residual_out, norm [T, C] and post_w, w [C] have one dtype, fp32 or bf16, and are row-major; rstd is fp32.
// Arithmetic is fp32. Pointers are aligned to their element. residual_out may be the same buffer as residual, because a
// thread reads an element before it writes it.
//
// Bytes moved per element in bf16: 4 read + 4 written, in place of 6 + 6. Expected: 85-90 % of bandwidth.
#include <surogate/dispatch.cuh>
#include <surogate/rmsnorm_rows.cuh>

#include "gemma.h"

namespace surogate {
namespace {

// Adds the squares of N elements to `sum`.
template <int N>
__device__ __forceinline__ void add_squares(const float (&values)[N], float& sum) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum = add_square(values[i], sum);
    }
}

// values = values * rstd * (w + offset). Products are written down, because an addition follows.
template <class T, int N>
__device__ __forceinline__ void normalize(float (&values)[N], float rstd, const T* w, float offset) {
    float scale[N];
    Vec<T, N>::load(w).to_float(scale);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        values[i] = __fmul_rn(__fmul_rn(values[i], rstd), __fadd_rn(scale[i], offset));
    }
}

// Returns residual + the rounded norm of y, rounded.
template <class T, int N>
__device__ __forceinline__ Packed<T, N> sum_of(float (&y)[N], float (&residual)[N], float rstd, const T* w,
                                               float offset) {
    normalize<T, N>(y, rstd, w, offset);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        residual[i] = __fadd_rn(to_float(from_float<T>(y[i])), residual[i]);
    }
    return Packed<T, N>::from_float(residual);
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::warp_row ? 32 * kRowsPerBlock : 1024)
    norm_add_rmsnorm_kernel(const T* y, const T* residual, const T* post_w, const T* w, T* norm, float* rstd_out,
                            T* residual_out, int64_t rows, int columns, float eps, float offset) {
    constexpr int N = Shape::width;
    using V = Packed<T, N>;
    __shared__ float scratch[32];
    const int lane = Shape::warp_row ? threadIdx.x % 32 : threadIdx.x;
    const int lanes = Shape::warp_row ? 32 : blockDim.x;
    const int64_t row =
        Shape::warp_row ? static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32 : blockIdx.x;
    if (row >= rows) {
        return;  // uniform over the warp; a block per row always has a row
    }
    const int vectors = columns / N;
    const int64_t start = row * columns;
    V held[Shape::held], added[Shape::held];
    float sum = 0;
#pragma unroll
    for (int k = 0; k < Shape::held; ++k) {
        const int i = lane + k * lanes;
        if (i < vectors) {
            held[k] = V::load(y + start + static_cast<int64_t>(i) * N);
            added[k] = V::load(residual + start + static_cast<int64_t>(i) * N);
        }
    }
#pragma unroll
    for (int k = 0; k < Shape::held; ++k) {
        if (lane + k * lanes < vectors) {
            float values[N];
            held[k].to_float(values);
            add_squares(values, sum);
        }
    }
    const float post_rstd = rstd_of(row_sum<Shape::warp_row>(sum, scratch), columns, eps);
    sum = 0;
#pragma unroll
    for (int k = 0; k < Shape::held; ++k) {
        const int i = lane + k * lanes;
        if (i < vectors) {
            float values[N], others[N];
            held[k].to_float(values);
            added[k].to_float(others);
            held[k] = sum_of<T, N>(values, others, post_rstd, post_w + static_cast<int64_t>(i) * N, offset);
            held[k].store(residual_out + start + static_cast<int64_t>(i) * N);
            held[k].to_float(values);
            add_squares(values, sum);
        }
    }
    const float rstd = rstd_of(row_sum<Shape::warp_row>(sum, scratch), columns, eps);
    if (lane == 0) {
        rstd_out[row] = rstd;
    }
#pragma unroll
    for (int k = 0; k < Shape::held; ++k) {
        const int i = lane + k * lanes;
        if (i < vectors) {
            const int64_t at = static_cast<int64_t>(i) * N;
            float values[N];
            held[k].to_float(values);
            normalize<T, N>(values, rstd, w + at, offset);
            V::from_float(values).store(norm + start + at);
        }
    }
}

// For rows of any length and alignment: one block per row, which reads y twice, and the sum once more.
template <class T, int N>
__global__ void __launch_bounds__(1024)
    norm_add_rmsnorm_any_kernel(const T* y, const T* residual, const T* post_w, const T* w, T* norm, float* rstd_out,
                                T* residual_out, int columns, float eps, float offset) {
    using V = Packed<T, N>;
    __shared__ float scratch[32];
    const int vectors = columns / N;
    const int64_t start = static_cast<int64_t>(blockIdx.x) * columns;
    float values[N], others[N];
    float sum = 0;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        V::load(y + start + static_cast<int64_t>(i) * N).to_float(values);
        add_squares(values, sum);
    }
    const float post_rstd = rstd_of(row_sum<false>(sum, scratch), columns, eps);
    sum = 0;
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        const int64_t at = static_cast<int64_t>(i) * N;
        V::load(y + start + at).to_float(values);
        V::load(residual + start + at).to_float(others);
        V total = sum_of<T, N>(values, others, post_rstd, post_w + at, offset);
        total.store(residual_out + start + at);
        total.to_float(values);
        add_squares(values, sum);
    }
    const float rstd = rstd_of(row_sum<false>(sum, scratch), columns, eps);
    if (threadIdx.x == 0) {
        rstd_out[blockIdx.x] = rstd;
    }
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        const int64_t at = static_cast<int64_t>(i) * N;
        V::load(residual_out + start + at).to_float(values);  // the same thread wrote it
        normalize<T, N>(values, rstd, w + at, offset);
        V::from_float(values).store(norm + start + at);
    }
}

}  // namespace

void norm_add_rmsnorm(const void* y_, const void* residual_, const void* post_w_, const void* w_, void* norm_,
                      void* rstd_, void* residual_out_, int64_t rows, int64_t columns_, float eps, float offset,
                      int dtype, cudaStream_t stream) {
    constexpr const char* op = "norm_add_rmsnorm";
    check_positive(rows, op, "rows");
    check_positive(columns_, op, "columns");
    with_float_type(dtype, op, "y", [&](auto type) {
        using T = typename decltype(type)::type;
        const auto *y = static_cast<const T*>(y_), *residual = static_cast<const T*>(residual_);
        const auto *post_w = static_cast<const T*>(post_w_), *w = static_cast<const T*>(w_);
        auto *norm = static_cast<T*>(norm_), *residual_out = static_cast<T*>(residual_out_);
        auto* rstd = static_cast<float*>(rstd_);
        check_pointers(op, y, residual, post_w, w, norm, rstd, residual_out);
        const int columns = to_int(columns_, op, "columns");
        const bool wide =
            columns % vector_width<T> == 0 && all_aligned({y, residual, post_w, w, norm, residual_out});
        with_row_shape<T>(rows, columns, wide, op, [&](auto shape, unsigned blocks, unsigned threads) {
            using Shape = decltype(shape);
            if constexpr (Shape::held == 0) {
                norm_add_rmsnorm_any_kernel<T, Shape::width><<<blocks, threads, 0, stream>>>(
                    y, residual, post_w, w, norm, rstd, residual_out, columns, eps, offset);
            } else {
                norm_add_rmsnorm_kernel<T, Shape><<<blocks, threads, 0, stream>>>(
                    y, residual, post_w, w, norm, rstd, residual_out, rows, columns, eps, offset);
            }
        });
    });
}

}  // namespace surogate
