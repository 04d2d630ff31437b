// Softmax and cross-entropy over rows of logits, and the sum of the rows' losses.
//
//   row_loss[t] = log(sum_v exp(logits[t, v])) - logits[t, targets[t]]                 0 where targets[t] < 0
//   logits[t, v] <- (exp(logits[t, v] - logsumexp) - (v == targets[t])) * loss_scale   0 where targets[t] < 0
//   loss (+)= loss_scale * sum_t row_loss[t]
//
// With a softcap c > 0, c * tanh(logits / c) stands in place of logits, and the gradient of a logit is multiplied by
// 1 - tanh(logit / c)^2.
//
// logits      [rows, vocab_size] fp32 or bf16, row stride `ld` elements (a multiple of 16 bytes), aligned to 16 bytes.
//             cross_entropy reads them. cross_entropy_grads overwrites them with their gradient, rounded once. Elements
//             from vocab_size to ld are neither read nor written.
// targets     int32 [rows]; negative: no label. A label >= vocab_size makes the loss of the row NaN.
// loss_scale  fp32 []
// row_loss    fp32 [rows], written
// loss        fp32 [], written, or accumulated into (+=) with `accumulate`
//
// Grid: one block of 512 threads per row. In the first pass, each thread computes a running maximum and the sum of
// exp(logit - maximum); the block combines them in a fixed order. The second pass reads the row again, starting at its
// end, which is the most likely to be in L2, and writes the gradient. Arithmetic is fp32; exp((logit - maximum) -
// log(sum)) preserves precision for large logits. sum_loss is one block; each thread sums a fixed part in fp64, so
// results are bit-identical from run to run. A NaN among the logits makes the loss of the row NaN.
//
// Bytes moved per logit of a labelled row in bf16: 4 (2 for the loss alone), plus up to 2 if the second read misses L2.
// Most reads miss: 4 blocks per SM have 160 MB of rows in flight at V = 152k, and L2 has 50 MB. Expected: 60-70 % of
// bandwidth. Unlabelled rows are only written. Online softmax: Milakov & Gimelshein 2018.
//
// On GPUs with thread block clusters, cross_entropy_grads of bf16 logits without a cap reads them once (cross_entropy_cluster.cu).

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cfloat>

#include "loss.h"
#include "softcap.cuh"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

constexpr int row_threads = 512;
constexpr int sum_threads = 1024;

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

template <class T, bool capped>
__device__ __forceinline__ T gradient(float logit, float softcap, float max, float log_sum, bool is_target,
                                      float scale) {
    const float x = capped_logit<capped>(logit, softcap);
    const float p = expf((x - max) - log_sum);
    return from_float<T>((is_target ? p - 1.0f : p) * scale * capped_slope<capped>(x, softcap));
}

template <class T, bool has_grads, bool capped>
__global__ void __launch_bounds__(row_threads, 4)
    cross_entropy_kernel(T* __restrict__ logits, const int* __restrict__ targets, const float* __restrict__ loss_scale,
                         float* __restrict__ row_loss, int64_t vocab_size, int64_t ld, float softcap) {
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
        if constexpr (has_grads) {
            const float zeros[V::size] = {};
            for (int64_t i = threadIdx.x; i < vectors; i += row_threads) {
                V::from_float(zeros).store(x + i * V::size);
            }
            for (int64_t i = tail + threadIdx.x; i < vocab_size; i += row_threads) {
                x[i] = from_float<T>(0.0f);
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

    if constexpr (has_grads) {
        const float scale = *loss_scale;
        for (int64_t i = tail + threadIdx.x; i < vocab_size; i += row_threads) {
            x[i] = gradient<T, capped>(to_float(x[i]), softcap, max, log_sum, i == target, scale);
        }
        const int64_t last = threadIdx.x + (vectors - 1 - threadIdx.x) / row_threads * row_threads;
        for (int64_t i = threadIdx.x < vectors ? last : -1; i >= 0; i -= row_threads) {
            float values[V::size];
            V vector = V::load(x + i * V::size);
            vector.to_float(values);
            const int64_t at = target - i * V::size;
#pragma unroll
            for (int j = 0; j < V::size; ++j) {
                vector[j] = gradient<T, capped>(values[j], softcap, max, log_sum, j == at, scale);
            }
            vector.store(x + i * V::size);
        }
    }
}

__global__ void __launch_bounds__(sum_threads)
    sum_loss_kernel(const float* __restrict__ row_loss, const float* __restrict__ loss_scale, float* __restrict__ loss,
                    int64_t rows, bool accumulate) {
    __shared__ double scratch[32];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < rows; i += sum_threads) {
        sum += row_loss[i];
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        const float scaled = static_cast<float>(sum * *loss_scale);
        *loss = accumulate ? *loss + scaled : scaled;
    }
}

void check_rows(const char* op, const void* logits, const void* targets, const void* row_loss, int64_t rows,
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

template <bool has_grads>
void launch(void* logits, const void* targets, const void* loss_scale, void* row_loss, int64_t rows,
            int64_t vocab_size, int64_t ld, float softcap, int dtype, cudaStream_t stream) {
    const auto grid = static_cast<unsigned>(rows);
    const auto* labels = static_cast<const int*>(targets);
    const auto* scale = static_cast<const float*>(loss_scale);
    auto* losses = static_cast<float*>(row_loss);
    const auto run = [&](auto kernel, auto* x) {
        kernel<<<grid, row_threads, 0, stream>>>(x, labels, scale, losses, vocab_size, ld, softcap);
    };
    if (dtype == BF16) {
        using T = __nv_bfloat16;
        run(softcap > 0 ? cross_entropy_kernel<T, has_grads, true> : cross_entropy_kernel<T, has_grads, false>,
            static_cast<T*>(logits));
    } else {
        run(softcap > 0 ? cross_entropy_kernel<float, has_grads, true> : cross_entropy_kernel<float, has_grads, false>,
            static_cast<float*>(logits));
    }
}

}  // namespace

void cross_entropy(const void* logits, const void* targets, void* row_loss, int64_t rows, int64_t vocab_size,
                   int64_t ld, float softcap, int dtype, cudaStream_t stream) {
    check_rows("cross_entropy", logits, targets, row_loss, rows, vocab_size, ld, dtype);
    launch<false>(const_cast<void*>(logits), targets, nullptr, row_loss, rows, vocab_size, ld, softcap, dtype,
                  stream);
    check_launch("cross_entropy");
}

void cross_entropy_grads(void* logits, const void* targets, const void* loss_scale, void* row_loss, int64_t rows,
                         int64_t vocab_size, int64_t ld, float softcap, int dtype, cudaStream_t stream) {
    check_rows("cross_entropy_grads", logits, targets, row_loss, rows, vocab_size, ld, dtype);
    check_pointer(loss_scale, "cross_entropy_grads", "loss_scale", 4);
    if (dtype == BF16 && softcap <= 0 && cluster_holds_row(vocab_size)) {
        cross_entropy_grads_in_cluster(logits, targets, loss_scale, row_loss, rows, vocab_size, ld, stream);
        return;
    }
    launch<true>(logits, targets, loss_scale, row_loss, rows, vocab_size, ld, softcap, dtype, stream);
    check_launch("cross_entropy_grads");
}

void sum_loss(const void* row_loss, const void* loss_scale, void* loss, int64_t rows, bool accumulate,
              cudaStream_t stream) {
    check_positive(rows, "sum_loss", "rows");
    check_pointer(row_loss, "sum_loss", "row_loss", 4);
    check_pointer(loss_scale, "sum_loss", "loss_scale", 4);
    check_pointer(loss, "sum_loss", "loss", 4);
    sum_loss_kernel<<<1, sum_threads, 0, stream>>>(static_cast<const float*>(row_loss),
                                                   static_cast<const float*>(loss_scale), static_cast<float*>(loss),
                                                   rows, accumulate);
    check_launch("sum_loss");
}

}  // namespace surogate
