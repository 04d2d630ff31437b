// The gradient of norm_add_rmsnorm. total = residual_out there, n = total * rstd, g = dnorm * (w + offset):
//   d_residual [T, C] = rstd * (g - n * mean_c(g * n)) (+ dtotal), rounded
//   post_rstd [T] = 1 / sqrt(mean_c(y[t, c]^2) + eps),  m = y * post_rstd,  h = d_residual * (post_w + offset):
//   d_y [T, C] = post_rstd * (h - m * mean_c(h * m))
//   dw [C]      (+)= sum_t dnorm * n
//   dpost_w [C] (+)= sum_t d_residual * m
//   norm [T, C] = n * (w + offset), with the bits of norm_add_rmsnorm; not computed if the pointer is null
//
// norm_add_rmsnorm_dgrad computes d_residual, d_y, and norm, alone.
//
// dnorm, total, y, dtotal, d_residual, d_y, norm [T, C] and w, post_w [C] have one dtype, fp32 or bf16, and are row-major;
// rstd is fp32 [T]; dtotal may be null. Arithmetic is fp32; each output is rounded once. Outputs must not overlap an input,
// except that d_residual may be the same buffer as dnorm, and d_y the same as y. dw and dpost_w are fp32 (written or
// accumulated into) or bf16 (written). Workspace: fp32 [2, min(T, 256), C], aligned to 16 bytes; none without dw and
// dpost_w. Other pointers are aligned to their element.
//
// Stage 1: at most 256 blocks, independent of the GPU. Block b processes rows b, b + blocks, ... and accumulates its parts
// of dw and dpost_w in registers. A row of up to 16 KiB is read once and kept in registers; of up to 8 KiB, a thread has
// one vector of 16 bytes of each matrix, and loads those of the next row before it uses those of this one. Rows that are
// unaligned or longer are read again, element by element. Stage 2 sums the partials in a fixed order.
//
// Bytes moved per element in bf16: 8 read + 4 written (6 + 4 without dtotal), and 2 more with norm, in place of 10 + 4. The
// partials add 16 bytes per column and block: 8 % at T = 4096.
#include <surogate/dispatch.cuh>
#include <surogate/reduce.cuh>
#include <surogate/rmsnorm_dx.cuh>
#include <surogate/rmsnorm_rows.cuh>
#include <surogate/sum_partials.cuh>

#include <algorithm>
#include <type_traits>

#include "gemma.h"

namespace surogate {
namespace {

constexpr int kMaxThreads = 512;
constexpr int64_t kMaxBlocks = 256;

template <class T>
struct Buffers {
    const T *dnorm, *total, *w;
    const float* rstd;
    const T *y, *post_w, *dtotal;
    T *d_residual, *d_y, *norm;
    float *dw, *dpost_w;  // partials; null: not computed
    int64_t rows;
    int columns;
    float eps, offset;
};

// Count sums over the block, the same on each thread. Between two calls with one `scratch` there is one with another.
template <int Count>
__device__ __forceinline__ void block_sums(float (&values)[Count], float (&scratch)[Count][kMaxThreads / 32]) {
#pragma unroll
    for (int j = 0; j < Count; ++j) {
        values[j] = warp_sum(values[j]);
        if (threadIdx.x % 32 == 0) {
            scratch[j][threadIdx.x / 32] = values[j];
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < Count; ++j) {
        values[j] = scratch[j][0];
        for (int warp = 1; warp < static_cast<int>(blockDim.x / 32); ++warp) {
            values[j] += scratch[j][warp];
        }
    }
}

// What a thread holds of a row.
template <class V, int Held>
struct Row {
    V dnorm[Held], total[Held], y[Held], dtotal[Held];
    float rstd;
};

template <class V, class T, int Held>
__device__ __forceinline__ void load_row(Row<V, Held>& row, const Buffers<T>& b, int64_t index, int vectors) {
    constexpr int N = 16 / sizeof(T);
    const int64_t start = index * b.columns;
    row.rstd = b.rstd[index];
#pragma unroll
    for (int k = 0; k < Held; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < vectors) {
            row.dnorm[k] = V::load(b.dnorm + start + i * N);
            row.total[k] = V::load(b.total + start + i * N);
            row.y[k] = V::load(b.y + start + i * N);
            if (b.dtotal != nullptr) {
                row.dtotal[k] = V::load(b.dtotal + start + i * N);
            }
        }
    }
}

// Held: number of vectors of a row that a thread keeps in registers. A thread has the same columns in every row.
template <class T, int Held, bool HasDw>
__global__ void __launch_bounds__(kMaxThreads) norm_add_rmsnorm_bwd_kernel(Buffers<T> b) {
    constexpr int N = vector_width<T>;
    constexpr bool Ahead = Held == 1;  // more vectors leave no registers for those of the next row
    using V = Packed<T, N>;
    __shared__ float first_sums[2][kMaxThreads / 32], second_sums[1][kMaxThreads / 32];
    const int vectors = b.columns / N;
    V w[Held], post_w[Held];
    float dw[Held][N] = {}, dpost_w[Held][N] = {};
#pragma unroll
    for (int k = 0; k < Held; ++k) {
        const int i = threadIdx.x + k * blockDim.x;
        if (i < vectors) {
            w[k] = V::load(b.w + i * N);
            post_w[k] = V::load(b.post_w + i * N);
        }
    }
    const auto weights = [&](V& packed, float (&out)[N]) {
        packed.to_float(out);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            out[i] += b.offset;
        }
    };
    Row<V, Held> row, next;
    if constexpr (Ahead) {
        load_row(next, b, blockIdx.x, vectors);
    }
    for (int64_t index = blockIdx.x; index < b.rows; index += gridDim.x) {
        if constexpr (Ahead) {
            row = next;
            if (index + gridDim.x < b.rows) {
                load_row(next, b, index + gridDim.x, vectors);
            }
        } else {
            load_row(row, b, index, vectors);
        }
        const int64_t start = index * b.columns;
        float sums[2] = {};  // of g * n, and of the squares of y
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            if (threadIdx.x + k * blockDim.x < vectors) {
                float d[N], v[N], y[N], scale[N];
                row.dnorm[k].to_float(d);
                row.total[k].to_float(v);
                row.y[k].to_float(y);
                weights(w[k], scale);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const NormElement element{d[i], scale[i], v[i], row.rstd};
                    sums[0] = element.add_to(sums[0]);
                    sums[1] = add_square(y[i], sums[1]);
                    if constexpr (HasDw) {
                        dw[k][i] += d[i] * element.normed();
                    }
                }
            }
        }
        block_sums(sums, first_sums);
        const float mean = sums[0] / b.columns, post_rstd = rstd_of(sums[1], b.columns, b.eps);
        float post_sum[1] = {};
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            const int column = (threadIdx.x + k * blockDim.x) * N;
            if (column < b.columns) {
                float d[N], v[N], y[N], scale[N], rest[N];
                row.dnorm[k].to_float(d);
                row.total[k].to_float(v);
                weights(w[k], scale);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    rest[i] = -0.0f;
                }
                if (b.dtotal != nullptr) {
                    row.dtotal[k].to_float(rest);
                }
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const NormElement element{d[i], scale[i], v[i], row.rstd};
                    d[i] = element.dx(mean, rest[i]);
                    v[i] = element.norm();
                }
                row.dnorm[k] = V::from_float(d);
                row.dnorm[k].store(b.d_residual + start + column);
                if (b.norm != nullptr) {
                    V::from_float(v).store(b.norm + start + column);
                }
                row.dnorm[k].to_float(d);
                row.y[k].to_float(y);
                weights(post_w[k], scale);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const NormElement element{d[i], scale[i], y[i], post_rstd};
                    post_sum[0] = element.add_to(post_sum[0]);
                    if constexpr (HasDw) {
                        dpost_w[k][i] += d[i] * element.normed();
                    }
                }
            }
        }
        block_sums(post_sum, second_sums);
        const float post_mean = post_sum[0] / b.columns;
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            const int column = (threadIdx.x + k * blockDim.x) * N;
            if (column < b.columns) {
                float d[N], y[N], scale[N];
                row.dnorm[k].to_float(d);
                row.y[k].to_float(y);
                weights(post_w[k], scale);
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    d[i] = NormElement{d[i], scale[i], y[i], post_rstd}.dx(post_mean);
                }
                V::from_float(d).store(b.d_y + start + column);
            }
        }
    }
    if constexpr (HasDw) {
        const int64_t mine = static_cast<int64_t>(blockIdx.x) * b.columns;
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            const int column = (threadIdx.x + k * blockDim.x) * N;
            if (column < b.columns) {
#pragma unroll
                for (int j = 0; j < N; j += 4) {
                    Packed<float>::from_float(dw[k] + j).store(b.dw + mine + column + j);
                    Packed<float>::from_float(dpost_w[k] + j).store(b.dpost_w + mine + column + j);
                }
            }
        }
    }
}

// For rows of any length and alignment. A thread reads and writes the same elements in each pass over a row.
template <class T>
__global__ void __launch_bounds__(1024) norm_add_rmsnorm_bwd_any_kernel(Buffers<T> b) {
    __shared__ float scratch[32];
    const int64_t mine = static_cast<int64_t>(blockIdx.x) * b.columns;
    for (int64_t index = blockIdx.x; index < b.rows; index += gridDim.x) {
        const int64_t start = index * b.columns;
        const bool is_first = index == blockIdx.x;
        const auto element = [&](int c) {
            return NormElement{to_float(b.dnorm[start + c]), to_float(b.w[c]) + b.offset, to_float(b.total[start + c]),
                               b.rstd[index]};
        };
        float sum = 0, squares = 0;
        for (int c = threadIdx.x; c < b.columns; c += blockDim.x) {
            sum = element(c).add_to(sum);
            squares = add_square(to_float(b.y[start + c]), squares);
        }
        const float mean = block_sum(sum, scratch) / b.columns;
        const float post_rstd = rstd_of(block_sum(squares, scratch), b.columns, b.eps);
        const auto post = [&](int c) {
            return NormElement{to_float(b.d_residual[start + c]), to_float(b.post_w[c]) + b.offset,
                               to_float(b.y[start + c]), post_rstd};
        };
        sum = 0;
        for (int c = threadIdx.x; c < b.columns; c += blockDim.x) {
            const NormElement of = element(c);
            if (b.norm != nullptr) {
                b.norm[start + c] = from_float<T>(of.norm());
            }
            b.d_residual[start + c] =
                from_float<T>(of.dx(mean, b.dtotal == nullptr ? -0.0f : to_float(b.dtotal[start + c])));
            const NormElement after = post(c);
            sum = after.add_to(sum);
            if (b.dw != nullptr) {
                b.dw[mine + c] = (is_first ? 0 : b.dw[mine + c]) + of.dy * of.normed();
                b.dpost_w[mine + c] = (is_first ? 0 : b.dpost_w[mine + c]) + after.dy * after.normed();
            }
        }
        const float post_mean = block_sum(sum, scratch) / b.columns;
        for (int c = threadIdx.x; c < b.columns; c += blockDim.x) {
            b.d_y[start + c] = from_float<T>(post(c).dx(post_mean));
        }
    }
}

template <class T, bool HasDw>
void launch(const Buffers<T>& b, const char* op, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(std::min(b.rows, kMaxBlocks));
    const auto threads_for = [](int64_t units) { return static_cast<unsigned>(ceil_div(units, 32) * 32); };
    const int vectors = b.columns / vector_width<T>;
    const bool wide =
        b.columns % vector_width<T> == 0 &&
        all_aligned({b.dnorm, b.total, b.w, b.y, b.post_w, b.dtotal, b.d_residual, b.d_y, b.norm, b.dw, b.dpost_w});
    if (wide && vectors <= kMaxThreads) {
        norm_add_rmsnorm_bwd_kernel<T, 1, HasDw><<<blocks, threads_for(vectors), 0, stream>>>(b);
    } else if (wide && vectors <= 2 * kMaxThreads) {
        norm_add_rmsnorm_bwd_kernel<T, 2, HasDw><<<blocks, threads_for(ceil_div(vectors, 2)), 0, stream>>>(b);
    } else {
        norm_add_rmsnorm_bwd_any_kernel<T><<<blocks, threads_for(std::min(b.columns, 1024)), 0, stream>>>(b);
    }
    check_launch(op);
}

// Calls function(Buffers<T>) with the arguments that both launchers have, once they are checked.
template <class Function>
void with_buffers(const void* dnorm, const void* total, const void* w, const void* rstd, const void* y,
                  const void* post_w, const void* dtotal, void* d_residual, void* d_y, void* norm, int64_t rows,
                  int64_t columns, float eps, float offset, int dtype, const char* op, Function&& function) {
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    with_float_type(dtype, op, "dnorm", [&](auto type) {
        using T = typename decltype(type)::type;
        const auto read = [](const void* pointer) { return static_cast<const T*>(pointer); };
        const auto written = [](void* pointer) { return static_cast<T*>(pointer); };
        const Buffers<T> b{read(dnorm),
                           read(total),
                           read(w),
                           static_cast<const float*>(rstd),
                           read(y),
                           read(post_w),
                           read(dtotal),
                           written(d_residual),
                           written(d_y),
                           written(norm),
                           nullptr,
                           nullptr,
                           rows,
                           to_int(columns, op, "columns"),
                           eps,
                           offset};
        check_pointers(op, b.dnorm, b.total, b.w, b.rstd, b.y, b.post_w, b.d_residual, b.d_y);
        if (dtotal != nullptr) {
            check_pointer(dtotal, op, "dtotal", sizeof(T));
        }
        if (norm != nullptr) {
            check_pointer(norm, op, "norm", sizeof(T));
        }
        function(b);
    });
}

void sum_rows(const float* partials, int64_t count, int64_t columns, void* out, bool accumulate, int dtype,
              const char* op, cudaStream_t stream) {
    with_float_type(dtype, op, "the gradient of a weight", [&](auto type) {
        using T = typename decltype(type)::type;
        sum_partials(partials, count, columns, static_cast<T*>(out), accumulate, op, stream);
    });
}

}  // namespace

void norm_add_rmsnorm_bwd(const void* dnorm, const void* total, const void* w, const void* rstd, const void* y,
                          const void* post_w, const void* dtotal, void* d_residual, void* d_y, void* dw, void* dpost_w,
                          void* norm, void* workspace, int64_t workspace_bytes, int64_t rows, int64_t columns,
                          float eps, float offset, bool accumulate_dw, bool accumulate_dpost_w, int dtype, int dtype_dw,
                          int dtype_dpost_w, cudaStream_t stream) {
    constexpr const char* op = "norm_add_rmsnorm_bwd";
    check_pointer(dw, op, "dw", bytes_of(dtype_dw));
    check_pointer(dpost_w, op, "dpost_w", bytes_of(dtype_dpost_w));
    check_pointer(workspace, op, "workspace", 16);
    check_accumulate(accumulate_dw, dtype_dw, op);
    check_accumulate(accumulate_dpost_w, dtype_dpost_w, op);
    const int64_t blocks = std::min(rows, kMaxBlocks), needed = 2 * blocks * columns * 4;
    SUROGATE_REQUIRE(workspace_bytes >= needed, op,
                     "workspace needs " + std::to_string(needed) + " bytes, got " + std::to_string(workspace_bytes));
    auto* partials = static_cast<float*>(workspace);
    with_buffers(dnorm, total, w, rstd, y, post_w, dtotal, d_residual, d_y, norm, rows, columns, eps, offset, dtype, op,
                 [&](auto b) {
                     b.dw = partials;
                     b.dpost_w = partials + blocks * columns;
                     launch<std::remove_const_t<std::remove_pointer_t<decltype(b.w)>>, true>(b, op, stream);
                 });
    sum_rows(partials, blocks, columns, dw, accumulate_dw, dtype_dw, op, stream);
    sum_rows(partials + blocks * columns, blocks, columns, dpost_w, accumulate_dpost_w, dtype_dpost_w, op, stream);
}

void norm_add_rmsnorm_dgrad(const void* dnorm, const void* total, const void* w, const void* rstd, const void* y,
                            const void* post_w, const void* dtotal, void* d_residual, void* d_y, void* norm,
                            int64_t rows, int64_t columns, float eps, float offset, int dtype, cudaStream_t stream) {
    constexpr const char* op = "norm_add_rmsnorm_dgrad";
    with_buffers(dnorm, total, w, rstd, y, post_w, dtotal, d_residual, d_y, norm, rows, columns, eps, offset, dtype, op,
                 [&](auto b) {
                     launch<std::remove_const_t<std::remove_pointer_t<decltype(b.w)>>, false>(b, op, stream);
                 });
}

}  // namespace surogate
