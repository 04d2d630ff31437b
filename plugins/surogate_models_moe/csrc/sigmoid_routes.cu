// Routes whose scores are sigmoids s of the logits. logits [T,E], fp32 or bf16; bias [E] fp32 or null; weights, d_weights
// [T,k] fp32; experts [T,k] int32; d_logits [T,E] as logits:
//   sigmoid_route      Experts are compared by s + bias, or by their logits without bias and groups. Of `groups` groups of E /
//                      groups experts, one after another, the `chosen_groups` with the largest sum of their two best remain.
//                      experts: the k largest of these in falling order; of equal ones, groups too, the lower number is first
//                      weights: s scale, with `normalize` s / (sum of the k + epsilon) scale
//   sigmoid_route_bwd  ds = d_weights scale, with `normalize` (ds - sum of ds s / S) / S with S = sum of the k + epsilon;
//                      d_logits = ds s (1 - s) for the k, and 0 for the others
//
// All pointers are aligned to their element; E is at most 512, k at most 16 and at most chosen_groups E / groups; groups at
// most 32, of two experts and more. Arithmetic is fp32, without the approximations of `sigmoid<true>`: a choice may depend on
// the last bit. NaN counts as the largest. A warp processes one token, and a lane every 32nd expert; lane g judges group g.
//
// Bytes as route. With groups, 4 E bytes a token pass through shared memory, and a lane reads those of a group.
#include "routes.h"

#include "routes.cuh"
#include "surogate/sigmoid.cuh"

namespace surogate {
namespace {

constexpr int most_groups = 32;

struct Weighing {
    bool normalize;
    float epsilon, scale;
};

// A mask of the chosen groups. values [n_experts] are what the experts of a token are compared by.
__device__ __forceinline__ unsigned best_groups(const float* values, int n_experts, int groups, int chosen, int lane) {
    unsigned key = 0;
    if (lane < groups) {
        const int size = n_experts / groups;
        float best = values[lane * size], second = values[lane * size + 1];
        if (in_order(second) > in_order(best)) {
            const float other = best;
            best = second;
            second = other;
        }
        for (int i = 2; i < size; ++i) {
            const float value = values[lane * size + i];
            if (in_order(value) > in_order(best)) {
                second = best;
                best = value;
            } else if (in_order(value) > in_order(second)) {
                second = value;
            }
        }
        key = in_order(best + second);
    }
    unsigned kept = 0;
    for (int j = 0; j < chosen; ++j) {
        const unsigned largest = __reduce_max_sync(full_warp, key);
        const int group = __ffs(static_cast<int>(__ballot_sync(full_warp, key == largest))) - 1;
        kept |= 1u << group;
        key = lane == group ? 0u : key;
    }
    return kept;
}

template <class T, int Each>
__global__ void __launch_bounds__(32 * warps)
    sigmoid_route_kernel(const T* logits, const float* bias, float* weights, int32_t* experts, int64_t tokens, int n_experts,
                         int k, int groups, int chosen_groups, Weighing how) {
    __shared__ float values[warps][32 * Each];
    int64_t token;
    if (!token_of(tokens, token)) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool by_score = bias != nullptr || groups > 1;
    float x[Each];
    unsigned keys[Each];
    float* own = values[threadIdx.x / 32];
#pragma unroll
    for (int i = 0; i < Each; ++i) {
        const int e = lane + 32 * i;
        x[i] = e < n_experts ? to_float(logits[token * n_experts + e]) : -INFINITY;
        float value = x[i];
        if (by_score && e < n_experts) {
            value = sigmoid<false>(x[i]).of;
            value = bias == nullptr ? value : value + bias[e];
        }
        own[e] = value;
        keys[i] = e < n_experts ? in_order(value) : 0u;
    }
    if (groups > 1) {
        __syncwarp();
        const unsigned kept = best_groups(own, n_experts, groups, chosen_groups, lane);
        const int size = n_experts / groups;
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            const int e = lane + 32 * i;
            if (e < n_experts && !(kept >> (e / size) & 1u)) {
                keys[i] = in_order(-INFINITY);
            }
        }
    }
    const Chosen mine = choose(keys, x, k, lane);
    float weight = lane < k ? sigmoid<false>(mine.logit).of : 0.0f;
    if (how.normalize) {
        weight /= warp_sum(weight) + how.epsilon;
    }
    if (lane < k) {
        weights[token * k + lane] = weight * how.scale;
        experts[token * k + lane] = mine.expert;
    }
}

template <class T, int Each>
__global__ void __launch_bounds__(32 * warps)
    sigmoid_route_bwd_kernel(const float* d_weights, const T* logits, const int32_t* experts, T* d_logits, int64_t tokens,
                             int n_experts, int k, Weighing how) {
    int64_t token;
    if (!token_of(tokens, token)) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int expert = lane < k ? experts[token * k + lane] : -1;
    float d = lane < k ? d_weights[token * k + lane] * how.scale : 0.0f;
    Sigmoid score{0.0f, 0.0f};
    if (lane < k) {
        score = sigmoid<false>(to_float(logits[token * n_experts + expert]));
    }
    if (how.normalize) {
        const float total = warp_sum(score.of) + how.epsilon;
        d = (d - warp_sum(d * score.of) / total) / total;
    }
    float x[Each] = {};
    write_gradients(d_logits + token * n_experts, x, expert, d * score.of * score.complement, k, n_experts, lane);
}

}  // namespace

void sigmoid_route(const void* logits, const void* bias, void* weights, void* experts, int64_t tokens, int64_t n_experts,
                   int64_t k, int64_t groups, int64_t chosen_groups, bool normalize, double epsilon, double scale, int dtype,
                   cudaStream_t stream) {
    constexpr const char* op = "sigmoid_route";
    check_routes(op, tokens, n_experts, k, dtype);
    SUROGATE_REQUIRE(groups > 0 && groups <= most_groups && n_experts % groups == 0, op,
                     "groups must be 1 to 32 and divide the experts, got " + std::to_string(groups));
    SUROGATE_REQUIRE(groups == 1 || n_experts / groups > 1, op, "groups must have two experts or more");
    SUROGATE_REQUIRE(chosen_groups > 0 && chosen_groups <= groups && k <= chosen_groups * (n_experts / groups), op,
                     "chosen_groups must be at most groups and have k experts, got " + std::to_string(chosen_groups));
    check_pointer(logits, op, "logits", bytes_of(dtype));
    check_pointer(weights, op, "weights", 4);
    check_pointer(experts, op, "experts", 4);
    SUROGATE_REQUIRE(is_aligned(bias, 4), op, "bias must be aligned to 4 bytes");
    const int blocks = to_int(ceil_div(tokens, warps), op, "tokens / 8");
    const Weighing how{normalize, static_cast<float>(epsilon), static_cast<float>(scale)};
    with_logits(dtype, n_experts, [&](auto type, auto each) {
        using T = decltype(type);
        sigmoid_route_kernel<T, decltype(each)::value><<<blocks, 32 * warps, 0, stream>>>(
            static_cast<const T*>(logits), static_cast<const float*>(bias), static_cast<float*>(weights),
            static_cast<int32_t*>(experts), tokens, static_cast<int>(n_experts), static_cast<int>(k),
            static_cast<int>(groups), static_cast<int>(chosen_groups), how);
    });
    check_launch(op);
}

void sigmoid_route_bwd(const void* d_weights, const void* logits, const void* experts, void* d_logits, int64_t tokens,
                       int64_t n_experts, int64_t k, bool normalize, double epsilon, double scale, int dtype,
                       cudaStream_t stream) {
    constexpr const char* op = "sigmoid_route_bwd";
    check_routes(op, tokens, n_experts, k, dtype);
    check_pointer(d_weights, op, "d_weights", 4);
    check_pointer(logits, op, "logits", bytes_of(dtype));
    check_pointer(experts, op, "experts", 4);
    check_pointer(d_logits, op, "d_logits", bytes_of(dtype));
    const int blocks = to_int(ceil_div(tokens, warps), op, "tokens / 8");
    const Weighing how{normalize, static_cast<float>(epsilon), static_cast<float>(scale)};
    with_logits(dtype, n_experts, [&](auto type, auto each) {
        using T = decltype(type);
        sigmoid_route_bwd_kernel<T, decltype(each)::value><<<blocks, 32 * warps, 0, stream>>>(
            static_cast<const float*>(d_weights), static_cast<const T*>(logits), static_cast<const int32_t*>(experts),
            static_cast<T*>(d_logits), tokens, static_cast<int>(n_experts), static_cast<int>(k), how);
    });
    check_launch(op);
}

}  // namespace surogate
