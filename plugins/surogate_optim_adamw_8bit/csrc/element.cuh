// The update of one element, and the factors that all elements share.
//
// `update_param` rounds every operation as IEEE 754 requires, for any input. `update_param_in_range` returns the same
// bits in about half as many instructions: it scales operands by powers of two where the compiler tests for special
// cases and branches. If it returns false, its result may be wrong.
//
//   sqrt(v)      Reciprocal root of the hardware and one correction, as the compiler does from 2^-101 on. v 2^48 is 0 or
//                not below, even if v is subnormal. The root is scaled by 2^24, and so is epsilon.
//   m / root     Reciprocal of the hardware, one correction of it and one of the quotient, as the compiler does. m 2^48
//                is 0 or at least 2^-101, so the residual of the quotient is exact. The quotient is scaled by 2^24.
//
// An overflow ends in NaN, because the corrections subtract infinities. A subnormal quotient is not rounded correctly, but
// it is far below half a unit of p unless p is tiny too. Hence the result is exact if |p| >= 2^-49, which is false for
// NaN.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace surogate {

struct Factors {
    float coef, beta1, rest1, beta2, rest2, epsilon, size;
    float scaled_epsilon;  // epsilon * 2^24
    float scaled_size;     // size / 2^24
    int32_t step;
    int32_t in_range;  // whether `update_param_in_range` may be used
    double lr;
    int64_t seed;
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
    f.scaled_epsilon = f.epsilon * 0x1p24f;
    f.scaled_size = f.size * 0x1p-24f;
    f.step = step;
    f.in_range = f.epsilon >= 0x1p-100f && f.epsilon <= 1.0f &&
                 (f.size == 0.0f || (f.size >= 0x1p-78f && f.size <= 0x1p36f));
    f.lr = lr;
    f.seed = seed;
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

__device__ __forceinline__ bool update_param_in_range(const Factors& f, float decay, float m, float v, float& p) {
    const float scaled_v = __fmul_rn(v, 0x1p48f);
    const float seed = approximate_rsqrt(__fadd_rn(scaled_v, 0x1p-126f));  // the sum differs from scaled_v for 0 alone
    float root = __fmul_rn(scaled_v, seed);
    root = __fmaf_rn(__fmaf_rn(-root, root, scaled_v), __fmul_rn(seed, 0.5f), root);
    root = __fadd_rn(root, f.scaled_epsilon);

    const float scaled_m = __fmul_rn(m, 0x1p48f);
    float reciprocal = approximate_reciprocal(root);
    reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-root, reciprocal, 1.0f), reciprocal);
    float quotient = __fmul_rn(scaled_m, reciprocal);
    quotient = __fmaf_rn(reciprocal, __fmaf_rn(-root, quotient, scaled_m), quotient);
    p = __fsub_rn(__fmul_rn(p, decay), __fmul_rn(f.scaled_size, quotient));
    return fabsf(p) >= 0x1p-49f;
}

}  // namespace surogate
