// GeGLU and its gradient, with equal bits in every kernel: every rounding is written down, and none depends on what the
// compiler contracts. gelu(g) = g (1 + t) / 2 with t = tanh(k (g + a g^3)), k = sqrt(2 / pi), a = 0.044715.
#pragma once

#include <cuda_runtime.h>

namespace surogate {

constexpr float gelu_k = 0.7978845608028654f;
constexpr float gelu_a = 0.044715f;

__device__ __forceinline__ float gelu_tanh(float g) {
    return tanhf(__fmul_rn(gelu_k, fmaf(__fmul_rn(__fmul_rn(gelu_a, g), g), g, g)));
}

// Returns up * gelu(gate), given tanh.
__device__ __forceinline__ float geglu_of(float gate, float up, float t) {
    return __fmul_rn(up, __fmul_rn(gate, __fmul_rn(0.5f, __fadd_rn(1.0f, t))));
}

// Returns gelu(gate) * up.
__device__ __forceinline__ float geglu(float gate, float up) { return geglu_of(gate, up, gelu_tanh(gate)); }

struct GegluGradient {
    float gate;    // dout * up * ((1 + t) / 2 + gate (1 - t^2) k (1 + 3 a gate^2) / 2)
    float up;      // dout * gelu(gate)
    float output;  // of GeGLU itself

    static __device__ __forceinline__ GegluGradient of(float dout, float gate, float up) {
        const float t = gelu_tanh(gate), half = __fmul_rn(0.5f, __fadd_rn(1.0f, t));
        const float rest = fmaf(__fmul_rn(3.0f * gelu_a, gate), gate, 1.0f);
        const float slope = fmaf(__fmul_rn(__fmul_rn(0.5f * gelu_k, gate), fmaf(-t, t, 1.0f)), rest, half);
        return {__fmul_rn(__fmul_rn(dout, up), slope), __fmul_rn(__fmul_rn(dout, gate), half), geglu_of(gate, up, t)};
    }
};

}  // namespace surogate
