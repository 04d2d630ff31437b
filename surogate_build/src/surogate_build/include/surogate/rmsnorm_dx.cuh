// The gradient of RMSNorm's input, element by element. Kernels that fuse it share it, so that they give the bits of
// separate kernels: every rounding is written down, and none depends on what the compiler contracts.
#pragma once

#include <cuda_runtime.h>

namespace surogate {

// An element of a row, in fp32.
struct NormElement {
    float dy, w, x, rstd;

    __device__ __forceinline__ float normed() const { return __fmul_rn(x, rstd); }

    // Returns the element of the norm, as rmsnorm computes it.
    __device__ __forceinline__ float norm() const { return __fmul_rn(normed(), w); }

    // Returns sum + dy w normed. This sum over a row, divided by its length, is `mean` below.
    __device__ __forceinline__ float add_to(float sum) const { return fmaf(__fmul_rn(dy, w), normed(), sum); }

    // Returns dx = rstd (dy w - normed mean).
    __device__ __forceinline__ float dx(float mean) const { return __fmul_rn(centred(mean), rstd); }

    // Returns dx + dresidual, rounded once. With a dresidual of -0 this is dx.
    __device__ __forceinline__ float dx(float mean, float dresidual) const {
        return fmaf(centred(mean), rstd, dresidual);
    }

private:
    __device__ __forceinline__ float centred(float mean) const { return fmaf(dy, w, -__fmul_rn(normed(), mean)); }
};

}  // namespace surogate
