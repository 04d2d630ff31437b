// The gate of experts in the form of gpt-oss, and its gradient, with equal bits in every kernel: every rounding is written
// down, and none depends on what the compiler contracts. With
//   g = min(gate, limit), v = max(-limit, min(up, limit)) + offset; NaN stays NaN
// it is g sigmoid(alpha g) v.
#pragma once

#include <cuda_runtime.h>

#include <limits>

#include "surogate/sigmoid.cuh"

namespace surogate {

struct ClampedGate {
    float alpha, limit, offset;  // limit: infinity for none

    // Of the attributes of ops, which have a limit of 0 for none.
    ClampedGate(double alpha, double limit, double offset)
        : alpha(static_cast<float>(alpha)),
          limit(limit > 0 ? static_cast<float>(limit) : std::numeric_limits<float>::infinity()),
          offset(static_cast<float>(offset)) {}

    struct Gradient {
        float gate;    // dout v sigmoid(alpha g) (1 + alpha g (1 - sigmoid(alpha g))), 0 where gate was above the limit
        float up;      // dout g sigmoid(alpha g), 0 where up was outside of the limits
        float output;  // of the gate itself
    };

    __device__ __forceinline__ float of(float gate, float up) const {
        const float g = clamped(gate);
        return __fmul_rn(__fmul_rn(g, sigmoid<true>(__fmul_rn(alpha, g)).of), value(up));
    }
    __device__ __forceinline__ Gradient gradient(float dout, float gate, float up) const {
        const float g = clamped(gate), v = value(up), scaled = __fmul_rn(alpha, g);
        const Sigmoid s = sigmoid<true>(scaled);
        const float opened = __fmul_rn(g, s.of), slope = fmaf(scaled, s.complement, 1.0f);
        return {gate > limit ? 0.0f : __fmul_rn(__fmul_rn(__fmul_rn(dout, v), s.of), slope),
                fabsf(up) > limit ? 0.0f : __fmul_rn(dout, opened), __fmul_rn(opened, v)};
    }

private:
    __device__ __forceinline__ float clamped(float x) const { return x > limit ? limit : x; }
    __device__ __forceinline__ float value(float up) const {
        const float x = clamped(up);
        return __fadd_rn(x < -limit ? -limit : x, offset);
    }
};

}  // namespace surogate
