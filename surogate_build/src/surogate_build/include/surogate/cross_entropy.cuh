// Softmax and cross-entropy over rows of logits: what packages share that write the gradient in formats of their own.
//
//   row_loss[t] = log(sum_v exp(logits[t, v])) - logits[t, targets[t]]                 0 where targets[t] < 0
//   gradient[t, v] = exp(logits[t, v] - logsumexp) - (v == targets[t])                 0 where targets[t] < 0
//
// With a softcap c > 0, c * tanh(logits / c) stands in place of logits, and the gradient of a logit is multiplied by
// 1 - tanh(logit / c)^2.
//
// logits      [rows, vocab_size] fp32 or bf16, row stride `ld` elements (a multiple of 16 bytes), aligned to 16 bytes.
//             Elements from vocab_size to ld are neither read nor written.
// targets     int32 [rows]; negative: no label. A label >= vocab_size makes the loss of the row NaN.
// loss_scale  fp32 []
// row_loss    fp32 [rows], written
//
// Where the gradient goes is a struct that is copied to the device:
//
//   has_gradient                       false: the kernel computes the loss alone, and the rest is not needed
//   shrinks                            elements of half the size take the place of the first half of a row of logits.
//                                      Rows are whole vectors then.
//   float scale(loss_scale)            what the gradient is multiplied with before it is stored
//   void store(x, row, at, values, loss_scale)  writes elements `at`, `at` + 1, ... of a row, whose logits begin at x: a
//                                      whole vector of 16 bytes of logits
//   void store_one(x, at, value)       writes one of the elements after the last whole vector; not with `shrinks`
//
// Grid: one block of 512 threads per row. In the first pass, each thread computes a running maximum and the sum of
// exp(logit - maximum); the block combines them in a fixed order. The second pass reads the row again, starting at its
// end, which is the most likely to be in L2, and writes the gradient; with `shrinks` it starts at the front, and waits
// for the whole block between reads and writes, so that no logit is overwritten that another thread has yet to read.
// Arithmetic is fp32; exp((logit - maximum) - log(sum)) preserves precision for large logits. A NaN among the logits
// makes the loss of the row NaN. Online softmax: Milakov & Gimelshein 2018.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <string>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/reduce.cuh"
#include "surogate/softcap.cuh"
#include "surogate/vec.cuh"

namespace surogate {

// Nothing but the loss.
struct LossAlone {
    static constexpr bool has_gradient = false;
};

namespace detail {

constexpr int row_threads = 512;

// sum = sum of exp(x - max) over the logits read so far. The initial maximum is finite, so that a logit of -inf
// contributes 0. A NaN does not become the maximum but propagates through the sum.
struct Running {
    float max = -FLT_MAX;
    float sum = 0.0f;
};

template <int N>
__device__ __forceinline__ void include(Running& running, const float (&x)[N]) {
    float max = running.max;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        max = fmaxf(max, x[i]);
    }
    float sum = running.sum * expf(running.max - max);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum += expf(x[i] - max);
    }
    running = {max, sum};
}

template <bool capped>
__device__ __forceinline__ float gradient(float logit, float softcap, float max, float log_sum, bool is_target,
                                          float scale) {
    const float x = capped_logit<capped>(logit, softcap);
    const float p = expf((x - max) - log_sum);
    return (is_target ? p - 1.0f : p) * scale * capped_slope<capped>(x, softcap);
}

template <class T, class Out, bool capped>
__global__ void __launch_bounds__(row_threads, 4)
    cross_entropy_kernel(T* __restrict__ logits, const int* __restrict__ targets, const float* __restrict__ loss_scale,
                         float* __restrict__ row_loss, const Out out, int64_t vocab_size, int64_t ld, float softcap) {
    using V = Vec<T>;
    __shared__ float scratch[32];
    const int64_t row = blockIdx.x;
    T* x = logits + row * ld;
    const int64_t vectors = vocab_size / V::size;
    const int64_t tail = vectors * V::size;
    const int target = targets[row];

    if (target < 0) {
        if (threadIdx.x == 0) {
            row_loss[row] = 0.0f;
        }
        if constexpr (Out::has_gradient) {
            for (int64_t i = threadIdx.x; i < vectors; i += row_threads) {
                float zeros[V::size] = {};
                out.store(x, row, i * V::size, zeros, 0.0f);
            }
            if constexpr (!Out::shrinks) {
                for (int64_t i = tail + threadIdx.x; i < vocab_size; i += row_threads) {
                    out.store_one(x, i, 0.0f);
                }
            }
        }
        return;
    }

    // Read before the reductions. Their barriers order this read before the writes of the second pass.
    const float target_logit = target < vocab_size ? capped_logit<capped>(to_float(x[target]), softcap) : nanf("");
    Running running;
    for (int64_t i = threadIdx.x; i < vectors; i += row_threads) {
        float values[V::size];
        V::load(x + i * V::size).to_float(values);
#pragma unroll
        for (int j = 0; j < V::size; ++j) {
            values[j] = capped_logit<capped>(values[j], softcap);
        }
        include(running, values);
    }
    for (int64_t i = tail + threadIdx.x; i < vocab_size; i += row_threads) {
        const float value[1] = {capped_logit<capped>(to_float(x[i]), softcap)};
        include(running, value);
    }
    const float max = block_max(running.max, scratch, -FLT_MAX);
    const float log_sum = logf(block_sum(running.sum * expf(running.max - max), scratch));
    if (threadIdx.x == 0) {
        row_loss[row] = log_sum - (target_logit - max);
    }

    if constexpr (Out::has_gradient) {
        const float factor = *loss_scale, scale = out.scale(factor);
        const auto write = [&](int64_t i, float (&values)[V::size]) {
            const int64_t at = target - i * V::size;
#pragma unroll
            for (int j = 0; j < V::size; ++j) {
                values[j] = gradient<capped>(values[j], softcap, max, log_sum, j == at, scale);
            }
            out.store(x, row, i * V::size, values, factor);
        };
        if constexpr (Out::shrinks) {
            for (int64_t first = 0; first < vectors; first += row_threads) {
                const int64_t i = first + threadIdx.x;
                float values[V::size] = {};
                if (i < vectors) {
                    V::load(x + i * V::size).to_float(values);
                }
                __syncthreads();
                if (i < vectors) {
                    write(i, values);
                }
            }
        } else {
            for (int64_t i = tail + threadIdx.x; i < vocab_size; i += row_threads) {
                out.store_one(x, i, gradient<capped>(to_float(x[i]), softcap, max, log_sum, i == target, scale));
            }
            const int64_t last = threadIdx.x + (vectors - 1 - threadIdx.x) / row_threads * row_threads;
            for (int64_t i = threadIdx.x < vectors ? last : -1; i >= 0; i -= row_threads) {
                float values[V::size];
                V::load(x + i * V::size).to_float(values);
                write(i, values);
            }
        }
    }
}

}  // namespace detail

inline void check_logits(const char* op, const void* logits, const void* targets, const void* row_loss, int64_t rows,
                         int64_t vocab_size, int64_t ld, int dtype) {
    check_positive(vocab_size, op, "vocab_size");
    SUROGATE_REQUIRE(dtype == BF16 || dtype == FP32, op, std::string("dtype cannot be ") + name_of(dtype));
    check_pointer(logits, op, "logits", 16);
    check_pointer(targets, op, "targets", 4);
    check_pointer(row_loss, op, "row_loss", 4);
    check_positive(rows, op, "rows");
    to_int(rows, op, "rows");
    to_int(vocab_size, op, "vocab_size");
    SUROGATE_REQUIRE(ld >= vocab_size && ld * bytes_of(dtype) % 16 == 0, op,
                     "ld must be at least vocab_size and a multiple of 16 bytes, got " + std::to_string(ld));
}

// Without a gradient, loss_scale may be null, and logits are only read. The caller has checked the arguments.
template <class T, class Out>
void launch_cross_entropy(T* logits, const void* targets, const void* loss_scale, void* row_loss, const Out& out,
                          int64_t rows, int64_t vocab_size, int64_t ld, float softcap, const char* op,
                          cudaStream_t stream) {
    const auto kernel =
        softcap > 0 ? detail::cross_entropy_kernel<T, Out, true> : detail::cross_entropy_kernel<T, Out, false>;
    kernel<<<static_cast<unsigned>(rows), detail::row_threads, 0, stream>>>(
        logits, static_cast<const int*>(targets), static_cast<const float*>(loss_scale), static_cast<float*>(row_loss),
        out, vocab_size, ld, softcap);
    check_launch(op);
}

}  // namespace surogate
