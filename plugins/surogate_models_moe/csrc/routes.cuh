// What kernels with a warp for each token's logits share: the choice of the largest, and checks.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {

constexpr int most_experts = 512;
constexpr int most_chosen = 16;
constexpr int warps = 8;

inline void check_routes(const char* op, int64_t tokens, int64_t n_experts, int64_t k, int dtype) {
    check_positive(tokens, op, "tokens");
    SUROGATE_REQUIRE(n_experts > 0 && n_experts <= most_experts, op,
                     "experts must be 1 to 512, got " + std::to_string(n_experts));
    SUROGATE_REQUIRE(k > 0 && k <= most_chosen && k <= n_experts, op,
                     "k must be 1 to 16 and at most the number of experts, got " + std::to_string(k));
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, std::string("logits must be fp32 or bf16, not ") + name_of(dtype));
}

// Calls launch(a zero of the type of the logits, experts of a lane): 8 of up to 256 experts, else 16.
template <class Launch>
void with_logits(int dtype, int64_t n_experts, Launch launch) {
    const auto with_each = [&](auto type) {
        if (n_experts <= 256) {
            launch(type, std::integral_constant<int, 8>{});
        } else {
            launch(type, std::integral_constant<int, 16>{});
        }
    };
    if (dtype == FP32) {
        with_each(float{});
    } else {
        with_each(__nv_bfloat16{});
    }
}

// Unsigned integers in the order of floats: -0 equals 0, and NaN comes last. 0 is below all floats.
__device__ __forceinline__ unsigned in_order(float x) {
    if (x != x) {
        return 0xffffffffu;
    }
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The token of a warp; false if there is none.
__device__ __forceinline__ bool token_of(int64_t tokens, int64_t& token) {
    token = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    return token < tokens;
}

// The expert of a lane, one of those chosen, and its logit.
struct Chosen {
    int expert = 0;
    float logit = -INFINITY;
};

// Lane j gets the expert with the j-th largest key, of equal keys the lower number first. Of lane l, keys[i] is that of expert
// l + 32 i, 0 beyond the experts, and x[i] its logit. The keys of chosen experts become 0.
template <int Each>
__device__ __forceinline__ Chosen choose(unsigned (&keys)[Each], const float (&x)[Each], int k, int lane) {
    Chosen mine;
    for (int j = 0; j < k; ++j) {
        unsigned key = 0;
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            key = keys[i] > key ? keys[i] : key;
        }
        key = __reduce_max_sync(full_warp, key);
        unsigned best = most_experts;
        float logit = 0.0f;
#pragma unroll
        for (int i = Each - 1; i >= 0; --i) {
            if (keys[i] == key) {
                best = lane + 32 * i;
                logit = x[i];
            }
        }
        const unsigned expert = __reduce_min_sync(full_warp, best);
        logit = __shfl_sync(full_warp, logit, static_cast<int>(expert % 32));
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            keys[i] = lane + 32 * i == static_cast<int>(expert) ? 0u : keys[i];
        }
        if (lane == j) {
            mine = {static_cast<int>(expert), logit};
        }
    }
    return mine;
}

// Writes a token's gradients: x[i] of expert lane + 32 i, but for the k chosen ones, of which lane j has an expert and its
// gradient.
template <class T, int Each>
__device__ __forceinline__ void write_gradients(T* row, float (&x)[Each], int expert, float gradient, int k, int n_experts,
                                                int lane) {
    for (int j = 0; j < k; ++j) {
        const int chosen = __shfl_sync(full_warp, expert, j);
        const float value = __shfl_sync(full_warp, gradient, j);
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            x[i] = lane + 32 * i == chosen ? value : x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < Each; ++i) {
        const int e = lane + 32 * i;
        if (e < n_experts) {
            row[e] = from_float<T>(x[i]);
        }
    }
}

}  // namespace surogate
