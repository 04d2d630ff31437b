// The update of one element, and the factors that all elements share.
//
// `update` rounds every operation as IEEE 754 requires, for any input. `update_in_range` returns the same bits in half
// as many instructions: it scales operands by powers of two where the compiler tests for special cases and branches. If
// it returns false, its results may be wrong.
//
//   sqrt(v)      Reciprocal root of the hardware and one correction, as the compiler does from 2^-101 on. v 2^48 is 0 or
//                not below, even if v is subnormal.
//   / sqrt(1 - b2^t)  The divisor is a constant. The product with its reciprocal, given as the sum of two floats, is a
//                float next to the quotient. Then a correction by the rounded reciprocal gives the rounded quotient
//                (Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000 processor").
//   m / root     Reciprocal of the hardware, one correction of it and one of the quotient, as the compiler does. m 2^48
//                is 0 or at least 2^-101, so the residual of the quotient is exact.
//
// An overflow ends in NaN, because the corrections subtract infinities. A subnormal quotient m / root is not rounded
// correctly, but it is far below half a unit of p unless p is tiny too. Hence the result is exact if |p| >= 2^-49, which
// is false for NaN. If p is not NaN, the moments are not NaN either.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "surogate/philox.cuh"

namespace surogate {

struct Factors {
    float coef, beta1, rest1, beta2, rest2, rate, correction2, epsilon;
    float scaled_rate;                  // rate / 2^48
    float divisor;                      // correction2 * 2^24
    float reciprocal, reciprocal_rest;  // of the divisor; their sum has twice the bits of a float
    double lr;
    int64_t seed;
    int32_t step;
    int32_t in_range;  // whether `update_in_range` may be used
    PhiloxKeys keys;
};

// Returns the factors. Those of the reference are computed in fp64 and then rounded.
__device__ inline Factors factors(float clip_coef, float lr, int step, int64_t seed, double beta1, double beta2,
                                  double epsilon) {
    const double t = step;
    Factors f;
    f.coef = clip_coef;
    f.beta1 = static_cast<float>(beta1);
    f.rest1 = static_cast<float>(1 - beta1);
    f.beta2 = static_cast<float>(beta2);
    f.rest2 = static_cast<float>(1 - beta2);
    f.rate = static_cast<float>(lr / (1 - pow(beta1, t)));
    f.correction2 = static_cast<float>(sqrt(1 - pow(beta2, t)));
    f.epsilon = static_cast<float>(epsilon);
    f.scaled_rate = f.rate * 0x1p-48f;
    f.divisor = f.correction2 * 0x1p24f;
    f.reciprocal = __frcp_rn(f.divisor);
    f.reciprocal_rest = __fmaf_rn(-f.divisor, f.reciprocal, 1.0f) * f.reciprocal;
    f.lr = lr;
    f.seed = seed;
    f.step = step;
    f.in_range = f.correction2 >= 0x1p-30f && f.correction2 <= 1.0f && f.epsilon >= 0x1p-100f && f.epsilon <= 1.0f &&
                 (f.rate == 0.0f || (f.rate >= 0x1p-78f && f.rate <= 0x1p36f));
    f.keys = philox_keys(seed);
    return f;
}

__device__ __forceinline__ float decay_of(const Factors& f, double weight_decay) {
    return static_cast<float>(__dsub_rn(1.0, __dmul_rn(f.lr, weight_decay)));
}

__device__ __forceinline__ void update_moments(const Factors& f, float g, float& m, float& v) {
    g = __fmul_rn(g, f.coef);
    m = __fadd_rn(__fmul_rn(m, f.beta1), __fmul_rn(g, f.rest1));
    v = __fadd_rn(__fmul_rn(v, f.beta2), __fmul_rn(__fmul_rn(g, g), f.rest2));
}

__device__ __forceinline__ void update(const Factors& f, float decay, float g, float& p, float& m, float& v) {
    update_moments(f, g, m, v);
    const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), f.correction2), f.epsilon);
    p = __fsub_rn(__fmul_rn(p, decay), __fmul_rn(f.rate, __fdiv_rn(m, root)));
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

__device__ __forceinline__ bool update_in_range(const Factors& f, float decay, float g, float& p, float& m, float& v) {
    update_moments(f, g, m, v);
    const float scaled_v = __fmul_rn(v, 0x1p48f);
    const float seed = approximate_rsqrt(__fadd_rn(scaled_v, 0x1p-126f));  // the sum differs from scaled_v for 0 alone
    float root = __fmul_rn(scaled_v, seed);
    root = __fmaf_rn(__fmaf_rn(-root, root, scaled_v), __fmul_rn(seed, 0.5f), root);

    float quotient = __fmaf_rn(root, f.reciprocal, __fmul_rn(root, f.reciprocal_rest));
    quotient = __fmaf_rn(__fmaf_rn(-f.divisor, quotient, root), f.reciprocal, quotient);
    root = __fadd_rn(quotient, f.epsilon);

    const float scaled_m = __fmul_rn(m, 0x1p48f);
    float reciprocal = approximate_reciprocal(root);
    reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-root, reciprocal, 1.0f), reciprocal);
    quotient = __fmul_rn(scaled_m, reciprocal);
    quotient = __fmaf_rn(reciprocal, __fmaf_rn(-root, quotient, scaled_m), quotient);
    p = __fsub_rn(__fmul_rn(p, decay), __fmul_rn(f.scaled_rate, quotient));
    return fabsf(p) >= 0x1p-49f;
}

}  // namespace surogate
