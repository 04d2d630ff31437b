// SwiGLU and its gradient, with equal bits in every kernel: silu(g) = g * sigmoid(g).
#pragma once

#include "surogate/sigmoid.cuh"

namespace surogate {

// Returns silu(gate) * up.
template <bool Fast>
__device__ __forceinline__ float swiglu(float gate, float up) {
    return up * (gate * sigmoid<Fast>(gate).of);
}

struct SwigluGradient {
    float gate;    // dout * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))
    float up;      // dout * silu(gate)
    float output;  // of SwiGLU itself

    template <bool Fast>
    static __device__ __forceinline__ SwigluGradient of(float dout, float gate, float up) {
        const Sigmoid s = sigmoid<Fast>(gate);
        return {dout * up * s.of * (1.0f + gate * s.complement), dout * gate * s.of, up * (gate * s.of)};
    }
};

}  // namespace surogate
