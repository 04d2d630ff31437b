// logits [T,E], fp32 or bf16; weights, d_weights [T,k] fp32; experts [T,k] int32; d_logits [T,E] as logits:
//   route      experts: those of the k largest logits in falling order, of equal ones the lower number first
//              weights: p = softmax(logits) of these; with `normalize`, the softmax over these k alone
//   route_bwd  d_logits = p (d_weights - m) for the k and -p m for the others, m = sum over the k of p d_weights;
//              with `normalize`, p is the softmax over the k, and the others are 0
//
// All pointers are aligned to their element; E is at most 256, k at most 16 and at most E. Arithmetic is fp32. NaN counts
// as the largest logit, so experts are always valid. A warp processes one token, and a lane every 32nd expert.
//
// Bytes in fp32: 4 E read and 8 k written a token; backward 4 E + 8 k read (with `normalize` 12 k) and 4 E written. 16,384
// tokens of 128 experts: 9.4 and 19 MB, 2 and 4 us at 4.8 TB/s. About 400 instructions of a warp a token, 10 us.
#include <cuda_runtime.h>

#include <cmath>

#include "routes.cuh"
#include "routes.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

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

template <class T>
__global__ void __launch_bounds__(32 * warps)
    route_kernel(const T* logits, float* weights, int32_t* experts, int64_t tokens, int n_experts, int k, bool normalize) {
    int64_t token;
    if (!token_of(tokens, token)) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    float x[each];
    unsigned keys[each];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const int e = lane + 32 * i;
        x[i] = e < n_experts ? to_float(logits[token * n_experts + e]) : -INFINITY;
        keys[i] = e < n_experts ? in_order(x[i]) : 0u;
        largest = fmaxf(largest, x[i]);
    }
    largest = warp_max(largest);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < each; ++i) {
        total += expf(x[i] - largest);  // 0 beyond the experts
    }
    total = warp_sum(total);

    int mine = 0;           // of lane j: the j-th expert
    float logit = -INFINITY;  // and its logit
    for (int j = 0; j < k; ++j) {
        unsigned key = 0;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            key = keys[i] > key ? keys[i] : key;
        }
        key = __reduce_max_sync(full_warp, key);
        unsigned best = most_experts;
        float chosen = 0.0f;
#pragma unroll
        for (int i = each - 1; i >= 0; --i) {
            if (keys[i] == key) {
                best = lane + 32 * i;
                chosen = x[i];
            }
        }
        const unsigned expert = __reduce_min_sync(full_warp, best);
        chosen = __shfl_sync(full_warp, chosen, static_cast<int>(expert % 32));
#pragma unroll
        for (int i = 0; i < each; ++i) {
            keys[i] = lane + 32 * i == static_cast<int>(expert) ? 0u : keys[i];
        }
        if (lane == j) {
            mine = static_cast<int>(expert);
            logit = chosen;
        }
    }
    const float share = lane < k ? expf(logit - largest) : 0.0f;
    const float sum = normalize ? warp_sum(share) : total;
    if (lane < k) {
        weights[token * k + lane] = share / sum;
        experts[token * k + lane] = mine;
    }
}

template <class T>
__global__ void __launch_bounds__(32 * warps)
    route_bwd_kernel(const float* d_weights, const T* logits, const int32_t* experts, T* d_logits, int64_t tokens,
                     int n_experts, int k, bool normalize) {
    int64_t token;
    if (!token_of(tokens, token)) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    const T* row = logits + token * n_experts;
    const int expert = lane < k ? experts[token * k + lane] : -1;
    const float d = lane < k ? d_weights[token * k + lane] : 0.0f;
    const float logit = lane < k ? to_float(row[expert]) : -INFINITY;
    float x[each];
    float largest = warp_max(logit);  // the first of the chosen experts has the largest of all logits
    float total = 0.0f;
    if (!normalize) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int e = lane + 32 * i;
            x[i] = e < n_experts ? expf(to_float(row[e]) - largest) : 0.0f;
            total += x[i];
        }
    }
    float p = lane < k ? expf(logit - largest) : 0.0f;
    total = warp_sum(normalize ? p : total);
    p /= total;
    const float mean = warp_sum(p * d);
    const float gradient = p * (d - mean);
#pragma unroll
    for (int i = 0; i < each; ++i) {
        x[i] = normalize ? 0.0f : -(x[i] / total) * mean;
    }
    for (int j = 0; j < k; ++j) {
        const int chosen = __shfl_sync(full_warp, expert, j);
        const float value = __shfl_sync(full_warp, gradient, j);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            x[i] = lane + 32 * i == chosen ? value : x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const int e = lane + 32 * i;
        if (e < n_experts) {
            d_logits[token * n_experts + e] = from_float<T>(x[i]);
        }
    }
}

int blocks_of(const char* op, int64_t tokens, int64_t n_experts, int64_t k, int dtype) {
    check_routes(op, tokens, n_experts, k, dtype);
    return to_int(ceil_div(tokens, warps), op, "tokens / 8");
}

}  // namespace

void route(const void* logits, void* weights, void* experts, int64_t tokens, int64_t n_experts, int64_t k, bool normalize,
           int dtype, cudaStream_t stream) {
    const int blocks = blocks_of("route", tokens, n_experts, k, dtype);
    check_pointer(logits, "route", "logits", bytes_of(dtype));
    check_pointer(weights, "route", "weights", 4);
    check_pointer(experts, "route", "experts", 4);
    float* w = static_cast<float*>(weights);
    int32_t* chosen = static_cast<int32_t*>(experts);
    const int e = static_cast<int>(n_experts), many = static_cast<int>(k);
    if (dtype == FP32) {
        route_kernel<float>
            <<<blocks, 32 * warps, 0, stream>>>(static_cast<const float*>(logits), w, chosen, tokens, e, many, normalize);
    } else {
        route_kernel<__nv_bfloat16><<<blocks, 32 * warps, 0, stream>>>(static_cast<const __nv_bfloat16*>(logits), w, chosen,
                                                                       tokens, e, many, normalize);
    }
    check_launch("route");
}

void route_bwd(const void* d_weights, const void* logits, const void* experts, void* d_logits, int64_t tokens,
               int64_t n_experts, int64_t k, bool normalize, int dtype, cudaStream_t stream) {
    const int blocks = blocks_of("route_bwd", tokens, n_experts, k, dtype);
    check_pointer(d_weights, "route_bwd", "d_weights", 4);
    check_pointer(logits, "route_bwd", "logits", bytes_of(dtype));
    check_pointer(experts, "route_bwd", "experts", 4);
    check_pointer(d_logits, "route_bwd", "d_logits", bytes_of(dtype));
    const float* d = static_cast<const float*>(d_weights);
    const int32_t* chosen = static_cast<const int32_t*>(experts);
    const int e = static_cast<int>(n_experts), many = static_cast<int>(k);
    if (dtype == FP32) {
        route_bwd_kernel<float><<<blocks, 32 * warps, 0, stream>>>(
            d, static_cast<const float*>(logits), chosen, static_cast<float*>(d_logits), tokens, e, many, normalize);
    } else {
        route_bwd_kernel<__nv_bfloat16><<<blocks, 32 * warps, 0, stream>>>(
            d, static_cast<const __nv_bfloat16*>(logits), chosen, static_cast<__nv_bfloat16*>(d_logits), tokens, e, many,
            normalize);
    }
    check_launch("route_bwd");
}

}  // namespace surogate
