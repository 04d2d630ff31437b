// logits [T,E], fp32 or bf16; weights, d_weights [T,k] fp32; experts [T,k] int32; d_logits [T,E] as logits:
//   route      experts: those of the k largest logits in falling order, of equal ones the lower number first
//              weights: p = softmax(logits) of these; with `normalize`, the softmax over these k alone
//   route_bwd  d_logits = p (d_weights - m) for the k and -p m for the others, m = sum over the k of p d_weights;
//              with `normalize`, p is the softmax over the k, and the others are 0
//
// All pointers are aligned to their element; E is at most 512, k at most 16 and at most E. Arithmetic is fp32. NaN counts
// as the largest logit, so experts are always valid. A warp processes one token, and a lane every 32nd expert.
//
// Bytes in fp32: 4 E read and 8 k written a token; backward 4 E + 8 k read (with `normalize` 12 k) and 4 E written. 16,384
// tokens of 128 experts: 9.4 and 19 MB, 2 and 4 us at 4.8 TB/s. About 400 instructions of a warp a token, 10 us.
#include "routes.h"

#include "routes.cuh"

namespace surogate {
namespace {

template <class T, int Each>
__global__ void __launch_bounds__(32 * warps)
    route_kernel(const T* logits, float* weights, int32_t* experts, int64_t tokens, int n_experts, int k, bool normalize) {
    int64_t token;
    if (!token_of(tokens, token)) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    float x[Each];
    unsigned keys[Each];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
        const int e = lane + 32 * i;
        x[i] = e < n_experts ? to_float(logits[token * n_experts + e]) : -INFINITY;
        keys[i] = e < n_experts ? in_order(x[i]) : 0u;
        largest = fmaxf(largest, x[i]);
    }
    largest = warp_max(largest);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
        total += expf(x[i] - largest);  // 0 beyond the experts
    }
    total = warp_sum(total);

    const Chosen mine = choose(keys, x, k, lane);
    const float share = lane < k ? expf(mine.logit - largest) : 0.0f;
    const float sum = normalize ? warp_sum(share) : total;
    if (lane < k) {
        weights[token * k + lane] = share / sum;
        experts[token * k + lane] = mine.expert;
    }
}

template <class T, int Each>
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
    float x[Each];
    float largest = warp_max(logit);  // the first of the chosen experts has the largest of all logits
    float total = 0.0f;
    if (!normalize) {
#pragma unroll
        for (int i = 0; i < Each; ++i) {
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
    for (int i = 0; i < Each; ++i) {
        x[i] = normalize ? 0.0f : -(x[i] / total) * mean;
    }
    write_gradients(d_logits + token * n_experts, x, expert, gradient, k, n_experts, lane);
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
    with_logits(dtype, n_experts, [&](auto type, auto each) {
        using T = decltype(type);
        route_kernel<T, decltype(each)::value><<<blocks, 32 * warps, 0, stream>>>(
            static_cast<const T*>(logits), static_cast<float*>(weights), static_cast<int32_t*>(experts), tokens,
            static_cast<int>(n_experts), static_cast<int>(k), normalize);
    });
    check_launch("route");
}

void route_bwd(const void* d_weights, const void* logits, const void* experts, void* d_logits, int64_t tokens,
               int64_t n_experts, int64_t k, bool normalize, int dtype, cudaStream_t stream) {
    const int blocks = blocks_of("route_bwd", tokens, n_experts, k, dtype);
    check_pointer(d_weights, "route_bwd", "d_weights", 4);
    check_pointer(logits, "route_bwd", "logits", bytes_of(dtype));
    check_pointer(experts, "route_bwd", "experts", 4);
    check_pointer(d_logits, "route_bwd", "d_logits", bytes_of(dtype));
    with_logits(dtype, n_experts, [&](auto type, auto each) {
        using T = decltype(type);
        route_bwd_kernel<T, decltype(each)::value><<<blocks, 32 * warps, 0, stream>>>(
            static_cast<const float*>(d_weights), static_cast<const T*>(logits), static_cast<const int32_t*>(experts),
            static_cast<T*>(d_logits), tokens, static_cast<int>(n_experts), static_cast<int>(k), normalize);
    });
    check_launch("route_bwd");
}

}  // namespace surogate
