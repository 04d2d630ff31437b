// Cross-entropy, the divergence from a teacher and the gradient of both, over rows of logits.
//
// For each row r with a label, at t = row_index[r], with y = logits[r] and s = y / temperature:
//
//   q_i         = exp(log_probs[t, i]), the teacher's probability of token ids[t, i], i < k, and of all others, i = k
//   p_i         = the student's of the same, softmax(s)[ids[t, i]], and the sum over all other tokens
//   D           = sum_i q_i (log q_i - log p_i); reverse: sum_i p_i (log p_i - log q_i)
//   row_cross_entropy[r] = log(sum_v exp(y_v)) - y_label
//   row_divergence[r]    = D
//   row_loss[r]          = (1 - weight) row_cross_entropy[r] + weight temperature^2 D
//
// and with gradients, b(v) being the i of token v,
//
//   logits[r, v] <- loss_scale ((1 - weight) (softmax(y)_v - (v == label)) + weight temperature d_v)    0 without a label
//   d_v         = softmax(s)_v - q_b(v) softmax(s)_v / p_b(v); reverse: softmax(s)_v (log p_b(v) - log q_b(v) - D)
//
// With a softcap c > 0, c * tanh(logits / c) stands in place of logits, and the gradient of a logit is multiplied by
// 1 - tanh(logit / c)^2. If k is vocab_size, there are no others.
//
// logits      [rows, vocab_size] fp32 or bf16, row stride `ld` elements (a multiple of 16 bytes), aligned to 16 bytes.
//             Overwritten: by the gradient, rounded once, or by undefined contents. Elements from vocab_size to ld are
//             neither read nor written.
// labels, row_index
//             int32 [rows]; negative: no label (labelled_rows). A label >= vocab_size makes the losses of the row NaN.
// ids         int32 [tokens, k], different in a row. One outside of the vocabulary makes the losses of the row NaN.
// log_probs   fp32 [tokens, k + 1]
// loss_scale  fp32 []; not read without gradients
// row_*       fp32 [rows], written where there is a label
//
// Grid: one block of 512 threads per row. The logits of the teacher's tokens move to shared memory, and -inf takes their
// place, so that the first pass sums over the others alone: 1 - sum p_i would lose all digits of a small remainder.
// It keeps a running maximum and the sums of exp(y - maximum) and exp((y - maximum) / temperature). The second pass,
// from the end of the row, which is the most likely to be in L2, writes the gradients of the others; those of the
// teacher's tokens follow. Arithmetic is fp32; the block adds in a fixed order, so results are bit-identical from run to
// run.
//
// Bytes moved per logit of a labelled row in bf16: 2, with gradients 4 to 6, as the second read hits L2 or not. The k
// tokens are read and written one by one, 32 bytes each: 4 k of these accesses, next to nothing for k of 32 and a
// vocabulary of 152k.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <utility>

#include "loss.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

constexpr int row_threads = 512;

struct Distillation {
    const int* ids;
    const float* log_probs;
    const float* loss_scale;
    float *loss, *cross_entropy, *divergence;
    int k;
    float weight, temperature, softcap;
    bool reverse;
};

// plain, soft = sums of exp(y - max) and exp((y - max) / temperature) over the logits read so far. The initial maximum is
// finite, so that a logit of -inf contributes 0.
struct Running {
    float max = -FLT_MAX;
    float plain = 0.0f;
    float soft = 0.0f;
};

template <int N>
__device__ __forceinline__ void include(Running& running, const float (&y)[N], float inverse) {
    float max = running.max;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        max = fmaxf(max, y[i]);
    }
    running.plain *= expf(running.max - max);
    running.soft *= expf((running.max - max) * inverse);
    running.max = max;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        running.plain += expf(y[i] - max);
        running.soft += expf((y[i] - max) * inverse);
    }
}

// A logit as the softmax reads it; -inf stays, in the place of the teacher's tokens.
template <bool capped>
__device__ __forceinline__ float capped_logit(float x, float softcap) {
    return capped && x != -INFINITY ? softcap * tanhf(x / softcap) : x;
}

template <class T, bool has_grads, bool capped>
__global__ void __launch_bounds__(row_threads, 2)
    distill_kernel(T* __restrict__ logits, const int* __restrict__ row_index, const int* __restrict__ labels,
                   Distillation d, int64_t vocab_size, int64_t ld) {
    using V = Vec<T>;
    extern __shared__ float top[];  // logits of the teacher's tokens
    __shared__ float scratch[32];
    const int64_t row = blockIdx.x;
    const int label = labels[row];
    T* x = logits + row * ld;
    const int64_t vectors = vocab_size / V::size;
    const int64_t tail = vectors * V::size;
    if (label < 0) {
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
    const int64_t t = row_index[row];
    const int* ids = d.ids + t * d.k;
    const float* q = d.log_probs + t * (d.k + 1);
    const float inverse = 1.0f / d.temperature;
    const bool has_others = d.k < vocab_size;
    const auto is_token = [&](int id) { return 0 <= id && id < vocab_size; };

    // Read before the teacher's tokens are overwritten, which the barrier orders.
    const float label_logit = label < vocab_size ? capped_logit<capped>(to_float(x[label]), d.softcap) : nanf("");
    float own_max = -FLT_MAX;
    for (int i = threadIdx.x; i < d.k; i += row_threads) {
        top[i] = is_token(ids[i]) ? capped_logit<capped>(to_float(x[ids[i]]), d.softcap) : nanf("");
        own_max = fmaxf(own_max, top[i]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d.k; i += row_threads) {
        if (is_token(ids[i])) {
            x[ids[i]] = from_float<T>(-INFINITY);
        }
    }
    __syncthreads();

    Running running;
    for (int64_t i = threadIdx.x; i < vectors; i += row_threads) {
        float values[V::size];
        V::load(x + i * V::size).to_float(values);
#pragma unroll
        for (int j = 0; j < V::size; ++j) {
            values[j] = capped_logit<capped>(values[j], d.softcap);
        }
        include(running, values, inverse);
    }
    for (int64_t i = tail + threadIdx.x; i < vocab_size; i += row_threads) {
        const float value[1] = {capped_logit<capped>(to_float(x[i]), d.softcap)};
        include(running, value, inverse);
    }
    const float others_max = block_max(running.max, scratch, -FLT_MAX);
    const float others_plain = block_sum(running.plain * expf(running.max - others_max), scratch);
    const float others_soft = block_sum(running.soft * expf((running.max - others_max) * inverse), scratch);
    const float max = fmaxf(others_max, block_max(own_max, scratch, -FLT_MAX));
    float plain = 0.0f, soft = 0.0f;
    for (int i = threadIdx.x; i < d.k; i += row_threads) {
        plain += expf(top[i] - max);
        soft += expf((top[i] - max) * inverse);
    }
    const float others_share = expf((others_max - max) * inverse);
    const float log_plain = logf(block_sum(plain, scratch) + others_plain * expf(others_max - max));
    const float log_soft = logf(block_sum(soft, scratch) + others_soft * others_share);

    const auto of_student = [&](int i) { return (top[i] - max) * inverse - log_soft; };
    const auto term = [&](float log_p, float log_q) {
        return d.reverse ? expf(log_p) * (log_p - log_q) : expf(log_q) * (log_q - log_p);
    };
    float sum = 0.0f;
    for (int i = threadIdx.x; i < d.k; i += row_threads) {
        sum += term(of_student(i), q[i]);
    }
    const float others_log_p = (others_max - max) * inverse + logf(others_soft) - log_soft;
    const float divergence = block_sum(sum, scratch) + (has_others ? term(others_log_p, q[d.k]) : 0.0f);
    if (threadIdx.x == 0) {
        const float cross_entropy = log_plain - (label_logit - max);
        d.cross_entropy[row] = cross_entropy;
        d.divergence[row] = divergence;
        d.loss[row] = (1.0f - d.weight) * cross_entropy + d.weight * d.temperature * d.temperature * divergence;
    }

    if constexpr (has_grads) {
        const float scale = *d.loss_scale;
        const float of_labels = (1.0f - d.weight) * scale, of_teacher = d.weight * d.temperature * scale;
        // d_v of the others is this times exp((y_v - others_max) / temperature)
        const float share = expf((others_max - max) * inverse - log_soft);
        const float others = !has_others ? 0.0f
                             : d.reverse ? share * (others_log_p - q[d.k] - divergence)
                                         : share - expf(q[d.k]) / others_soft;
        const auto gradient = [&](float y, int64_t v, float of_divergence) {
            const float p = expf((y - max) - log_plain);
            const float slope = capped ? 1.0f - y / d.softcap * (y / d.softcap) : 1.0f;
            return (of_labels * (v == label ? p - 1.0f : p) + of_teacher * of_divergence) * slope;
        };
        const auto of_other = [&](float logit, int64_t v) {
            const float y = capped_logit<capped>(logit, d.softcap);
            return y == -INFINITY ? 0.0f : gradient(y, v, others * expf((y - others_max) * inverse));
        };
        for (int64_t i = tail + threadIdx.x; i < vocab_size; i += row_threads) {
            x[i] = from_float<T>(of_other(to_float(x[i]), i));
        }
        const int64_t last = threadIdx.x + (vectors - 1 - threadIdx.x) / row_threads * row_threads;
        for (int64_t i = threadIdx.x < vectors ? last : -1; i >= 0; i -= row_threads) {
            float values[V::size];
            V::load(x + i * V::size).to_float(values);
#pragma unroll
            for (int j = 0; j < V::size; ++j) {
                values[j] = of_other(values[j], i * V::size + j);
            }
            V::from_float(values).store(x + i * V::size);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < d.k; i += row_threads) {
            if (is_token(ids[i])) {
                const float log_p = of_student(i), p = expf(log_p);
                const float own = d.reverse ? p * (log_p - q[i] - divergence) : p - expf(q[i]);
                x[ids[i]] = from_float<T>(gradient(top[i], ids[i], own));
            }
        }
    }
}

template <bool has_grads, class T>
void launch(T* logits, const int* row_index, const int* labels, const Distillation& d, int64_t rows,
            int64_t vocab_size, int64_t ld, cudaStream_t stream) {
    const auto grid = static_cast<unsigned>(rows);
    const auto shared = static_cast<size_t>(d.k) * sizeof(float);
    const auto kernel = d.softcap > 0 ? distill_kernel<T, has_grads, true> : distill_kernel<T, has_grads, false>;
    kernel<<<grid, row_threads, shared, stream>>>(logits, row_index, labels, d, vocab_size, ld);
}

}  // namespace

void distill(void* logits, const void* row_index, const void* labels, const void* ids, const void* log_probs,
             const void* loss_scale, void* row_loss, void* row_cross_entropy, void* row_divergence, int64_t rows,
             int64_t vocab_size, int64_t ld, int64_t k, float weight, float temperature, bool reverse, float softcap,
             bool has_grads, int dtype, cudaStream_t stream) {
    constexpr const char* op = "distill";
    SUROGATE_REQUIRE(dtype == BF16 || dtype == FP32, op, std::string("dtype cannot be ") + name_of(dtype));
    check_positive(vocab_size, op, "vocab_size");
    check_positive(rows, op, "rows");
    to_int(rows, op, "rows");
    to_int(vocab_size, op, "vocab_size");
    SUROGATE_REQUIRE(ld >= vocab_size && ld * bytes_of(dtype) % 16 == 0, op,
                     "ld must be at least vocab_size and a multiple of 16 bytes, got " + std::to_string(ld));
    SUROGATE_REQUIRE(1 <= k && k <= vocab_size && k <= most_teacher_tokens, op,
                     "k must be from 1 to vocab_size and at most " + std::to_string(most_teacher_tokens) + ", got " +
                         std::to_string(k));
    SUROGATE_REQUIRE(temperature > 0 && 0 <= weight && weight <= 1, op,
                     "temperature must be positive, and weight from 0 to 1");
    check_pointer(logits, op, "logits", 16);
    for (const auto& [pointer, name] :
         {std::pair{row_index, "row_index"}, std::pair{labels, "labels"}, std::pair{ids, "ids"},
          std::pair{log_probs, "log_probs"}, std::pair{loss_scale, "loss_scale"},
          std::pair{static_cast<const void*>(row_loss), "row_loss"},
          std::pair{static_cast<const void*>(row_cross_entropy), "row_cross_entropy"},
          std::pair{static_cast<const void*>(row_divergence), "row_divergence"}}) {
        check_pointer(pointer, op, name, 4);
    }
    const Distillation d{static_cast<const int*>(ids),
                         static_cast<const float*>(log_probs),
                         static_cast<const float*>(loss_scale),
                         static_cast<float*>(row_loss),
                         static_cast<float*>(row_cross_entropy),
                         static_cast<float*>(row_divergence),
                         static_cast<int>(k),
                         weight,
                         temperature,
                         softcap,
                         reverse};
    const auto* index = static_cast<const int*>(row_index);
    const auto* label = static_cast<const int*>(labels);
    const auto run = [&](auto* x) {
        if (has_grads) {
            launch<true>(x, index, label, d, rows, vocab_size, ld, stream);
        } else {
            launch<false>(x, index, label, d, rows, vocab_size, ld, stream);
        }
    };
    if (dtype == BF16) {
        run(static_cast<__nv_bfloat16*>(logits));
    } else {
        run(static_cast<float*>(logits));
    }
    check_launch(op);
}

}  // namespace surogate
