// The update of one element, and the factors that all elements share.
//
// `update_param` rounds every operation as IEEE 754 requires, for any input. `update_param_in_range` returns the same
// bits in about half as many instructions, where the compiler tests for special cases and branches. It takes moments that
// are scaled by powers of two, m 2^80 and v 2^100:
//
//   sqrt(v)      Reciprocal root of the hardware and one correction, as the compiler does from 2^-101 on. The root is
//                scaled by 2^50, and so is epsilon.
//   m / root     Reciprocal of the hardware, one correction of it and one of the quotient, as the compiler does. The
//                quotient is scaled by 2^30.
//
// The result is exact if the moments are in [2^-100, 2^27], or for others if |p| >= 2^-49 and p is not NaN:
//   - v may be 0 or subnormal: v 2^100 is 0 or at least 2^-49, so the residuals are exact.
//   - m may be 0 or subnormal too. A subnormal quotient is not rounded correctly, but it is far below half a unit of p
//     unless p is tiny.
//   - An overflow ends in NaN, because the corrections subtract infinities.
//
// `update_scaled_moments` yields the scaled moments from the scaled old ones. Results of at least 2^-100 have the bits
// of `update_moments`: if a product is subnormal there, and so less exact, it is below half a unit of the other product.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "surogate/philox.cuh"

namespace surogate {

constexpr float m_scaling = 0x1p80f;
constexpr float v_scaling = 0x1p100f;

struct Factors {
    float coef, beta1, rest1, beta2, rest2, epsilon, size;
    float scaled_rest1;    // rest1 * 2^80
    float scaled_rest2;    // rest2 * 2^100
    float scaled_epsilon;  // epsilon * 2^50
    float scaled_size;     // size / 2^30
    int32_t step;
    int32_t in_range;  // whether `update_param_in_range` may be used
    double lr;
    int64_t seed;
    PhiloxKeys keys;
};

// Returns the factors. Those of the reference are computed in fp64 from the betas in fp32, and then rounded.
__device__ inline Factors factors(float clip_coef, float lr, int step, int64_t seed, double beta1, double beta2,
                                  double epsilon) {
    const double t = step;
    Factors f;
    f.coef = clip_coef;
    f.beta1 = static_cast<float>(beta1);
    f.beta2 = static_cast<float>(beta2);
    const double b1 = f.beta1, b2 = f.beta2;
    f.rest1 = static_cast<float>(1 - b1);
    f.rest2 = static_cast<float>(1 - b2);
    const double correction2 = sqrt(1 - pow(b2, t));
    f.epsilon = static_cast<float>(__dmul_rn(epsilon, correction2));
    f.size = static_cast<float>(__dmul_rn(lr, correction2) / (1 - pow(b1, t)));
    f.scaled_rest1 = f.rest1 * m_scaling;
    f.scaled_rest2 = f.rest2 * v_scaling;
    f.scaled_epsilon = f.epsilon * 0x1p50f;
    f.scaled_size = f.size * 0x1p-30f;
    f.step = step;
    f.in_range = f.epsilon >= 0x1p-100f && f.epsilon <= 1.0f &&
                 (f.size == 0.0f || (f.size >= 0x1p-78f && f.size <= 0x1p36f));
    f.lr = lr;
    f.seed = seed;
    f.keys = philox_keys(seed);
    return f;
}

__device__ __forceinline__ float decay_of(const Factors& f, double weight_decay) {
    return static_cast<float>(__dsub_rn(1.0, __dmul_rn(f.lr, weight_decay)));
}

__device__ __forceinline__ void update_moments(const Factors& f, float g, float& m, float& v) {
    g = __fmul_rn(g, f.coef);
    m = __fadd_rn(__fmul_rn(m, f.beta1), __fmul_rn(g, f.rest1));
    v = __fadd_rn(__fmul_rn(v, f.beta2), __fmul_rn(__fmul_rn(g, f.rest2), g));
}

__device__ __forceinline__ void update_scaled_moments(const Factors& f, float g, float& m, float& v) {
    g = __fmul_rn(g, f.coef);
    m = __fadd_rn(__fmul_rn(m, f.beta1), __fmul_rn(g, f.scaled_rest1));
    v = __fadd_rn(__fmul_rn(v, f.beta2), __fmul_rn(__fmul_rn(g, f.scaled_rest2), g));
}

__device__ __forceinline__ void update_param(const Factors& f, float decay, float m, float v, float& p) {
    const float root = __fadd_rn(__fsqrt_rn(v), f.epsilon);
    p = __fsub_rn(__fmul_rn(p, decay), __fmul_rn(f.size, __fdiv_rn(m, root)));
}

__device__ __forceinline__ float approximate_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float approximate_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// positive_v: scaled_v, or if that may be 0 a positive number that differs from it for 0 alone.
__device__ __forceinline__ void update_param_in_range(const Factors& f, float decay, float scaled_m, float scaled_v,
                                                      float positive_v, float& p) {
    const float seed = approximate_rsqrt(positive_v);
    float root = __fmul_rn(scaled_v, seed);
    root = __fmaf_rn(__fmaf_rn(-root, root, scaled_v), __fmul_rn(seed, 0.5f), root);
    root = __fadd_rn(root, f.scaled_epsilon);

    float reciprocal = approximate_reciprocal(root);
    reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-root, reciprocal, 1.0f), reciprocal);
    float quotient = __fmul_rn(scaled_m, reciprocal);
    quotient = __fmaf_rn(reciprocal, __fmaf_rn(-root, quotient, scaled_m), quotient);
    p = __fsub_rn(__fmul_rn(p, decay), __fmul_rn(f.scaled_size, quotient));
}

}  // namespace surogate
