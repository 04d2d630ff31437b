// Losses of pairs of answers, rewards, and the gradient of the loss. Row i of sums, labels and reference, fp32 [pairs, 2], is
// of the chosen and the rejected answer of a pair: the sum of its log-probabilities, its number of labels, and that sum in
// the reference (null: 0). Row i of margin, fp32 [pairs, 2] (null: 0), begins with how much better the chosen answer is. Pairs
// of which an answer has no label are none.
//
// With p and r of one answer in the policy and the reference, divided by its labels for ipo, simpo and orpo,
// h = (p - r of the chosen) - (p - r of the rejected), z = beta h - gamma - margin, s = smoothing:
//
//   form         0 sigmoid, 1 hinge, 2 ipo, 3 simpo, 4 orpo
//   loss         sigmoid, simpo  -(1 - s) log sigmoid(z) - s log sigmoid(-z)
//                hinge           max(0, 1 - beta h)
//                ipo             (h - 1 / (2 beta))^2
//                orpo            -p of the chosen - beta log sigmoid(o(p of the chosen) - o(p of the rejected)),
//                                o(p) = p - log(1 - exp(p)), the log odds; p is at most -2^-23 in it
// Every form adds center (p - r of the chosen + p - r of the rejected)^2 to the loss, and nll times the mean of
// -log-probabilities of the chosen answer. In the figures p and r of ipo are of sums:
//
//   chosen, rejected, gain   beta (p - r) of both, and the difference
//   accuracy     gain > 0
//   more         [5]: p of both; that mean; for orpo log sigmoid of the difference of the log odds, and this, else 0
//
// figures.cuh says how they are summed and how the gradients of `sums` are written. Pointers are aligned to their element.

#include <surogate/check.h>

#include <cfloat>

#include "figures.cuh"
#include "pair_loss.h"

namespace surogate {
namespace {

enum Form { sigmoid_form, hinge, ipo, simpo, orpo, forms };

struct Pairs {
    static constexpr int documents = 2;
    static constexpr int n_figures = 10;

    const float* sums;
    const float* labels;
    const float* reference;
    const float* margins;
    int form;
    float beta, smoothing, gamma, center, nll;

    __device__ float known(int64_t i) const { return reference == nullptr ? 0.0f : reference[i]; }

    __device__ bool load(int64_t pair, float (&p)[2], float (&r)[2], float (&n)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            n[i] = labels[2 * pair + i];
            if (!(n[i] > 0.0f)) {
                return false;
            }
            p[i] = sums[2 * pair + i];
            r[i] = known(2 * pair + i);
            if (form == ipo || form == simpo || form == orpo) {
                p[i] /= n[i];
                r[i] /= n[i];
            } else {
                n[i] = 1.0f;
            }
        }
        return true;
    }

    __device__ float wanted(int64_t pair) const { return gamma + (margins == nullptr ? 0.0f : margins[2 * pair]); }

    // Comparisons, not fminf and fmaxf, because these would drop a NaN.
    static __device__ float uncertain(float p) { return p > -FLT_EPSILON ? -FLT_EPSILON : p; }
    static __device__ float log_odds(float p) { return uncertain(p) - logf(-expm1f(uncertain(p))); }

    __device__ bool figures(int64_t pair, float (&values)[n_figures]) const {
        float p[2], r[2], n[2];
        if (!load(pair, p, r, n)) {
            return false;
        }
        float chosen = p[0] - r[0], rejected = p[1] - r[1];
        const float h = chosen - rejected, entropy = -sums[2 * pair] / labels[2 * pair];
        float odds = 0.0f, ratio = 0.0f;
        if (form == orpo) {
            odds = log_odds(p[0]) - log_odds(p[1]);
            ratio = log_sigmoid(odds);
            values[0] = -p[0] - beta * ratio;
        } else if (form == ipo) {
            const float distance = h - 0.5f / beta;
            values[0] = distance * distance;
        } else if (form == hinge) {
            const float missing = 1.0f - beta * h;
            values[0] = missing <= 0.0f ? 0.0f : missing;
        } else {
            const float z = beta * h - wanted(pair);
            values[0] = -(1.0f - smoothing) * log_sigmoid(z) - smoothing * log_sigmoid(-z);
        }
        const float off = chosen + rejected;
        values[0] += center * (off * off);
        values[0] += nll > 0.0f ? nll * entropy : 0.0f;
        if (form == ipo) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                p[i] = sums[2 * pair + i];
            }
            chosen = p[0] - known(2 * pair);
            rejected = p[1] - known(2 * pair + 1);
        }
        const float gain = chosen - rejected;
        values[1] = beta * chosen;
        values[2] = beta * rejected;
        values[3] = beta * gain;
        values[4] = gain > 0.0f ? 1.0f : 0.0f;
        values[5] = p[0];
        values[6] = p[1];
        values[7] = entropy;
        values[8] = ratio;
        values[9] = odds;
        return true;
    }

    __device__ bool gradient(int64_t pair, float (&d_sums)[2]) const {
        float p[2], r[2], n[2];
        if (!load(pair, p, r, n)) {
            return false;
        }
        const float chosen = p[0] - r[0], rejected = p[1] - r[1], h = chosen - rejected;
        if (form == orpo) {
            const float d = -beta * sigmoid<false>(log_odds(p[0]) - log_odds(p[1])).complement;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float slope = p[i] > -FLT_EPSILON ? 0.0f : -1.0f / expm1f(p[i]);
                d_sums[i] = i == 0 ? d * slope - 1.0f : -d * slope;
            }
        } else {
            float d;
            if (form == ipo) {
                d = 2.0f * (h - 0.5f / beta);
            } else if (form == hinge) {
                d = 1.0f - beta * h <= 0.0f ? 0.0f : -beta;
            } else {
                const Sigmoid at = sigmoid<false>(beta * h - wanted(pair));
                d = beta * (smoothing * at.of - (1.0f - smoothing) * at.complement);
            }
            d_sums[0] = d;
            d_sums[1] = -d;
        }
        const float off = 2.0f * center * (chosen + rejected);
        d_sums[0] = (d_sums[0] + off) / n[0];
        d_sums[1] = (d_sums[1] + off) / n[1];
        d_sums[0] -= nll > 0.0f ? nll / labels[2 * pair] : 0.0f;
        return true;
    }
};

Pairs checked(const char* op, const float* sums, const float* labels, const float* scale, const float* reference,
              const float* margin, int64_t pairs, int form, double beta, double smoothing, double gamma, double center,
              double nll) {
    check_positive(pairs, op, "pairs");
    check_pointers(op, sums, labels, scale);
    SUROGATE_REQUIRE(is_aligned(reference, 4), op, "reference must be aligned to 4 bytes");
    SUROGATE_REQUIRE(is_aligned(margin, 4), op, "margin must be aligned to 4 bytes");
    SUROGATE_REQUIRE(form >= 0 && form < forms, op, "unknown form " + std::to_string(form));
    return {sums,
            labels,
            reference,
            margin,
            form,
            static_cast<float>(beta),
            static_cast<float>(smoothing),
            static_cast<float>(gamma),
            static_cast<float>(center),
            static_cast<float>(nll)};
}

}  // namespace

void pair_loss(const float* sums, const float* labels, const float* scale, const float* reference, const float* margin,
               float* loss, float* chosen, float* rejected, float* gain, float* accuracy, float* more, int64_t pairs,
               int form, double beta, double smoothing, double gamma, double center, double nll, int adds,
               cudaStream_t stream) {
    constexpr const char* op = "pair_loss";
    const Pairs each =
        checked(op, sums, labels, scale, reference, margin, pairs, form, beta, smoothing, gamma, center, nll);
    check_pointers(op, loss, chosen, rejected, gain, accuracy, more);
    Figures<Pairs::n_figures> figures{{loss, chosen, rejected, gain, accuracy}};
    for (int i = 0; i < 5; ++i) {
        figures.of[5 + i] = more + i;
    }
    sum_figures_kernel<<<1, group_threads, 0, stream>>>(each, scale, figures, pairs, spread(adds, 5, 5));
    check_launch(op);
}

void pair_loss_bwd(const float* d_loss, const float* sums, const float* labels, const float* scale,
                   const float* reference, const float* margin, float* d_sums, int64_t pairs, int form, double beta,
                   double smoothing, double gamma, double center, double nll, cudaStream_t stream) {
    constexpr const char* op = "pair_loss_bwd";
    const Pairs each =
        checked(op, sums, labels, scale, reference, margin, pairs, form, beta, smoothing, gamma, center, nll);
    check_pointers(op, d_loss, d_sums);
    const int blocks = to_int(ceil_div(pairs, group_threads), op, "pairs / 256");
    group_gradients_kernel<<<blocks, group_threads, 0, stream>>>(each, scale, d_loss, d_sums, pairs);
    check_launch(op);
}

}  // namespace surogate
