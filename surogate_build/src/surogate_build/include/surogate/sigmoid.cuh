// The logistic function. Kernels that fuse an activation share it, so that they give the bits of separate kernels.
#pragma once

#include <cuda_runtime.h>

namespace surogate {

struct Sigmoid {
    float of;          // sigmoid(x)
    float complement;  // 1 - sigmoid(x), without cancellation
};

// Computed from exp(-|x|), which cannot overflow. Fast uses the hardware exponential and division: an error of 2 ulp for
// moderate x and at worst 2^-17 relative.
template <bool Fast>
__device__ __forceinline__ Sigmoid sigmoid(float x) {
    float small, large;
    if constexpr (Fast) {
        const float e = __expf(-fabsf(x));
        large = __fdividef(1.0f, 1.0f + e);
        small = e * large;
    } else {
        const float e = expf(-fabsf(x));
        large = 1.0f / (1.0f + e);
        small = e / (1.0f + e);
    }
    return x >= 0 ? Sigmoid{large, small} : Sigmoid{small, large};
}

}  // namespace surogate
