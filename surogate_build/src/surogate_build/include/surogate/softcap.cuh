// Logits with a cap: softcap * tanh(x / softcap). Without `capped`, the logits as they are.
#pragma once

#include <cuda_runtime.h>

namespace surogate {

template <bool capped>
__device__ __forceinline__ float capped_logit(float x, float softcap) {
    return capped ? softcap * tanhf(x / softcap) : x;
}

// The derivative where the logit with the cap is y.
template <bool capped>
__device__ __forceinline__ float capped_slope(float y, float softcap) {
    return capped ? 1.0f - y / softcap * (y / softcap) : 1.0f;
}

}  // namespace surogate
