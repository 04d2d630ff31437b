// What losses of tokens need of the logits of a chunk, and the gradient of these logits.
//
// token_statistics, for each row r with a label, at t = row_index[r]:
//   logsumexp[t] = log(sum_v exp(logits[r, v]))
//   log_probs[t] = logits[r, labels[r]] - logsumexp[t]
//   mean[t]      = sum_v logits[r, v] / vocab_size
// token_logit_grads, with a, b, c = d_log_probs[t], d_logsumexp[t], d_mean[t]:
//   logits[r, v] <- (b - a) exp(logits[r, v] - logsumexp[t]) + a (v == labels[r]) + c / vocab_size     0 without a label
//
// With a softcap c > 0, c * tanh(logits / c) stands in place of logits, and the gradient of a logit is multiplied by
// 1 - tanh(logit / c)^2.
//
// logits      [rows, vocab_size] fp32 or bf16, row stride `ld` elements (a multiple of 16 bytes), aligned to 16 bytes.
//             token_statistics reads them; token_logit_grads overwrites them, rounded once. Elements from vocab_size to
//             ld are neither read nor written.
// labels, row_index
//             int32 [rows]; negative: no label (labelled_rows). A label >= vocab_size makes log_probs NaN.
// log_probs, logsumexp, mean and their gradients
//             fp32 [tokens], of which the rows with a label are read or written
//
// Grid: one block of 512 threads per row. Arithmetic is fp32; the block combines maxima, sums of exp(logit - maximum)
// and sums of logits in a fixed order, so results are bit-identical from run to run.
//
// Bytes moved per logit of a labelled row in bf16: 2 in token_statistics, 4 in token_logit_grads. Floor at 4.8 TB/s and
// V = 152k: 63 and 127 us per 1,000 rows.

#include <surogate/dispatch.cuh>
#include <surogate/reduce.cuh>
#include <surogate/softcap.cuh>

#include <cfloat>

#include "loss.h"

namespace surogate {
namespace {

constexpr int row_threads = 512;

// scaled = sum of exp(x - max), plain = sum of x, over the logits read so far. The initial maximum is finite, so that a
// logit of -inf contributes 0 to the first sum.
struct Sums {
    float max = -FLT_MAX;
    float scaled = 0.0f;
    float plain = 0.0f;
};

template <int N>
__device__ __forceinline__ void include(Sums& sums, const float (&x)[N]) {
    float max = sums.max;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        max = fmaxf(max, x[i]);
    }
    sums.scaled *= expf(sums.max - max);
    sums.max = max;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sums.scaled += expf(x[i] - max);
        sums.plain += x[i];
    }
}

template <class T, bool capped>
__global__ void __launch_bounds__(row_threads, 4)
    token_statistics_kernel(const T* __restrict__ logits, const int* __restrict__ row_index,
                            const int* __restrict__ labels, float* __restrict__ log_probs,
                            float* __restrict__ logsumexp, float* __restrict__ mean, int64_t vocab_size, int64_t ld,
                            float softcap) {
    using V = Vec<T>;
    __shared__ float scratch[32];
    const int64_t row = blockIdx.x;
    const int label = labels[row];
    if (label < 0) {
        return;
    }
    const T* x = logits + row * ld;
    const int64_t vectors = vocab_size / V::size;
    Sums sums;
    for (int64_t i = threadIdx.x; i < vectors; i += row_threads) {
        float values[V::size];
        V::load(x + i * V::size).to_float(values);
#pragma unroll
        for (int j = 0; j < V::size; ++j) {
            values[j] = capped_logit<capped>(values[j], softcap);
        }
        include(sums, values);
    }
    for (int64_t i = vectors * V::size + threadIdx.x; i < vocab_size; i += row_threads) {
        const float value[1] = {capped_logit<capped>(to_float(x[i]), softcap)};
        include(sums, value);
    }
    const float max = block_max(sums.max, scratch, -FLT_MAX);
    const float log_sum = logf(block_sum(sums.scaled * expf(sums.max - max), scratch));
    const float plain = block_sum(sums.plain, scratch);
    if (threadIdx.x == 0) {
        const int64_t t = row_index[row];
        logsumexp[t] = max + log_sum;
        log_probs[t] = label < vocab_size ? (capped_logit<capped>(to_float(x[label]), softcap) - max) - log_sum : nanf("");
        mean[t] = plain / static_cast<float>(vocab_size);
    }
}

template <class T, bool capped>
__global__ void __launch_bounds__(row_threads, capped ? 3 : 4)  // SM80 spills 36 bytes of four blocks with a cap
    token_logit_grads_kernel(T* __restrict__ logits, const int* __restrict__ row_index, const int* __restrict__ labels,
                             const float* __restrict__ logsumexp, const float* __restrict__ d_log_probs,
                             const float* __restrict__ d_logsumexp, const float* __restrict__ d_mean,
                             int64_t vocab_size, int64_t ld, float softcap) {
    using V = Vec<T>;
    const int64_t row = blockIdx.x;
    const int label = labels[row];
    T* x = logits + row * ld;
    float log_sum = 0.0f, of_softmax = 0.0f, of_label = 0.0f, of_all = 0.0f;
    if (label >= 0) {
        const int64_t t = row_index[row];
        log_sum = logsumexp[t];
        of_label = d_log_probs[t];
        of_softmax = d_logsumexp[t] - of_label;
        of_all = d_mean[t] / static_cast<float>(vocab_size);
    }
    const auto gradient = [&](float logit, int64_t v) {
        if (label < 0) {
            return 0.0f;
        }
        const float y = capped_logit<capped>(logit, softcap);
        const float spread = fmaf(expf(y - log_sum), of_softmax, of_all);
        return (v == label ? spread + of_label : spread) * capped_slope<capped>(y, softcap);
    };
    const int64_t vectors = vocab_size / V::size;
    for (int64_t i = threadIdx.x; i < vectors; i += row_threads) {
        float values[V::size];
        V::load(x + i * V::size).to_float(values);
#pragma unroll
        for (int j = 0; j < V::size; ++j) {
            values[j] = gradient(values[j], i * V::size + j);
        }
        V::from_float(values).store(x + i * V::size);
    }
    for (int64_t i = vectors * V::size + threadIdx.x; i < vocab_size; i += row_threads) {
        x[i] = from_float<T>(gradient(to_float(x[i]), i));
    }
}

unsigned checked_rows(const char* op, const void* logits, const void* row_index, const void* labels, int64_t rows,
                      int64_t vocab_size, int64_t ld, int dtype) {
    check_positive(vocab_size, op, "vocab_size");
    SUROGATE_REQUIRE(dtype == BF16 || dtype == FP32, op, std::string("dtype cannot be ") + name_of(dtype));
    check_pointer(logits, op, "logits", 16);
    check_pointer(row_index, op, "row_index", 4);
    check_pointer(labels, op, "labels", 4);
    check_positive(rows, op, "rows");
    to_int(vocab_size, op, "vocab_size");
    SUROGATE_REQUIRE(ld >= vocab_size && ld * bytes_of(dtype) % 16 == 0, op,
                     "ld must be at least vocab_size and a multiple of 16 bytes, got " + std::to_string(ld));
    return static_cast<unsigned>(to_int(rows, op, "rows"));
}

}  // namespace

void token_statistics(const void* logits, const void* row_index, const void* labels, void* log_probs, void* logsumexp,
                      void* mean, int64_t rows, int64_t vocab_size, int64_t ld, float softcap, int dtype,
                      cudaStream_t stream) {
    constexpr const char* op = "token_statistics";
    const unsigned grid = checked_rows(op, logits, row_index, labels, rows, vocab_size, ld, dtype);
    with_float_type(dtype, op, "logits", [&](auto type) {
        using T = typename decltype(type)::type;
        const auto kernel = softcap > 0 ? token_statistics_kernel<T, true> : token_statistics_kernel<T, false>;
        kernel<<<grid, row_threads, 0, stream>>>(
            static_cast<const T*>(logits), static_cast<const int*>(row_index), static_cast<const int*>(labels),
            static_cast<float*>(log_probs), static_cast<float*>(logsumexp), static_cast<float*>(mean), vocab_size, ld,
            softcap);
    });
    check_launch(op);
}

void token_logit_grads(void* logits, const void* row_index, const void* labels, const void* logsumexp,
                       const void* d_log_probs, const void* d_logsumexp, const void* d_mean, int64_t rows,
                       int64_t vocab_size, int64_t ld, float softcap, int dtype, cudaStream_t stream) {
    constexpr const char* op = "token_logit_grads";
    const unsigned grid = checked_rows(op, logits, row_index, labels, rows, vocab_size, ld, dtype);
    with_float_type(dtype, op, "logits", [&](auto type) {
        using T = typename decltype(type)::type;
        const auto kernel = softcap > 0 ? token_logit_grads_kernel<T, true> : token_logit_grads_kernel<T, false>;
        kernel<<<grid, row_threads, 0, stream>>>(
            static_cast<T*>(logits), static_cast<const int*>(row_index), static_cast<const int*>(labels),
            static_cast<const float*>(logsumexp), static_cast<const float*>(d_log_probs),
            static_cast<const float*>(d_logsumexp), static_cast<const float*>(d_mean), vocab_size, ld, softcap);
    });
    check_launch(op);
}

}  // namespace surogate
