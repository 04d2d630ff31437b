// The loss of answers that are alone, each desirable or not (KTO), and its gradient. sums, labels, reference and desirable,
// fp32 [answers], are of each answer: the sum of its log-probabilities, its number of labels, that sum in the reference, and
// 1 or 0. Rows without labels are no answers. mean_log_ratio, a scalar in device memory, is of mismatched answers.
//
// With h = sum - reference, kl = max(0, mean_log_ratio), s = 1 for desirable answers and else -1, z = s beta (h - kl):
//
//   loss           weight (1 - sigmoid(z)), weight being that of desirable answers or that of the others
//   log_ratio, kl  h and kl
//   signed_reward  z
//   accuracy       z > 0
//   by_label       [2, 3], of desirable answers, then of the others: 1, beta h and sum
//   gradient       -weight s beta sigmoid(z) (1 - sigmoid(z)), of sum
//
// figures.cuh says how they are summed and how the gradients of `sums` are written. Pointers are aligned to their element.

#include <surogate/check.h>

#include "figures.cuh"
#include "kto_loss.h"

namespace surogate {
namespace {

struct Answers {
    static constexpr int documents = 1;
    static constexpr int n_figures = 11;

    const float* sums;
    const float* labels;
    const float* reference;
    const float* desirable;
    const float* mean_log_ratio;
    float beta, desirable_weight, undesirable_weight;

    struct Answer {
        float weight, slope, log_ratio, kl, reward;
    };

    __device__ bool load(int64_t i, Answer& answer) const {
        const bool wanted = desirable[i] > 0.0f;
        const float mean = *mean_log_ratio;
        answer.weight = wanted ? desirable_weight : undesirable_weight;
        answer.slope = wanted ? beta : -beta;
        answer.log_ratio = sums[i] - reference[i];
        answer.kl = mean < 0.0f ? 0.0f : mean;  // keeps a NaN
        answer.reward = answer.slope * (answer.log_ratio - answer.kl);
        return labels[i] > 0.0f;
    }

    __device__ bool figures(int64_t i, float (&values)[n_figures]) const {
        Answer answer;
        const bool used = load(i, answer);
        values[0] = answer.weight * sigmoid<false>(answer.reward).complement;
        values[1] = answer.log_ratio;
        values[2] = answer.kl;
        values[3] = answer.reward;
        values[4] = answer.reward > 0.0f ? 1.0f : 0.0f;
        const float each[3] = {1.0f, beta * answer.log_ratio, sums[i]};
#pragma unroll
        for (int column = 0; column < 3; ++column) {
            values[5 + column] = answer.slope > 0.0f ? each[column] : 0.0f;
            values[8 + column] = answer.slope > 0.0f ? 0.0f : each[column];
        }
        return used;
    }

    __device__ bool gradient(int64_t i, float (&d_sums)[1]) const {
        Answer answer;
        const bool used = load(i, answer);
        const Sigmoid at = sigmoid<false>(answer.reward);
        d_sums[0] = -answer.weight * answer.slope * at.of * at.complement;
        return used;
    }
};

Answers checked(const char* op, const float* sums, const float* labels, const float* scale, const float* reference,
                const float* desirable, const float* mean_log_ratio, int64_t answers, double beta,
                double desirable_weight, double undesirable_weight) {
    check_positive(answers, op, "answers");
    check_pointers(op, sums, labels, scale, reference, desirable, mean_log_ratio);
    return {sums,
            labels,
            reference,
            desirable,
            mean_log_ratio,
            static_cast<float>(beta),
            static_cast<float>(desirable_weight),
            static_cast<float>(undesirable_weight)};
}

}  // namespace

void kto_loss(const float* sums, const float* labels, const float* scale, const float* reference,
              const float* desirable, const float* mean_log_ratio, float* loss, float* log_ratio, float* kl,
              float* signed_reward, float* accuracy, float* by_label, int64_t answers, double beta,
              double desirable_weight, double undesirable_weight, int adds, cudaStream_t stream) {
    constexpr const char* op = "kto_loss";
    const Answers each = checked(op, sums, labels, scale, reference, desirable, mean_log_ratio, answers, beta,
                                 desirable_weight, undesirable_weight);
    check_pointers(op, loss, log_ratio, kl, signed_reward, accuracy, by_label);
    Figures<Answers::n_figures> figures{{loss, log_ratio, kl, signed_reward, accuracy}};
    for (int i = 0; i < 6; ++i) {
        figures.of[5 + i] = by_label + i;
    }
    sum_figures_kernel<<<1, group_threads, 0, stream>>>(each, scale, figures, answers, spread(adds, 5, 6));
    check_launch(op);
}

void kto_loss_bwd(const float* d_loss, const float* sums, const float* labels, const float* scale,
                  const float* reference, const float* desirable, const float* mean_log_ratio, float* d_sums,
                  int64_t answers, double beta, double desirable_weight, double undesirable_weight, cudaStream_t stream) {
    constexpr const char* op = "kto_loss_bwd";
    const Answers each = checked(op, sums, labels, scale, reference, desirable, mean_log_ratio, answers, beta,
                                 desirable_weight, undesirable_weight);
    check_pointers(op, d_loss, d_sums);
    const int blocks = to_int(ceil_div(answers, group_threads), op, "answers / 256");
    group_gradients_kernel<<<blocks, group_threads, 0, stream>>>(each, scale, d_loss, d_sums, answers);
    check_launch(op);
}

}  // namespace surogate
