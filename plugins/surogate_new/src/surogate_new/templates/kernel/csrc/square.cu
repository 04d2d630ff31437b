// acme_toy: y = max(x, 0)^2, element by element; computed in fp32 and rounded once, to nearest even.
//
//   x, y  fp32 or bf16 [n], aligned to 16 bytes
//
// A thread computes 16 bytes of y. Bytes moved: each element once in and once out.
#include <surogate/check.h>
#include <surogate/dtype.h>
#include <surogate/vec.cuh>

#include "square.h"

namespace {

constexpr const char* op = "acme_toy";
constexpr int threads = 256;

template <class T>
__global__ void __launch_bounds__(threads) square_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n) {
    using V = surogate::Vec<T>;
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) * V::size;
    if (first + V::size <= n) {
        float f[V::size];
        V::load(x + first).to_float(f);
#pragma unroll
        for (int k = 0; k < V::size; ++k) {
            const float positive = fmaxf(f[k], 0.0f);
            f[k] = f[k] != f[k] ? f[k] : positive * positive;  // fmaxf would turn NaN into 0
        }
        V::from_float(f).store(y + first);
        return;
    }
    for (int64_t i = first; i < n; ++i) {  // the last elements
        const float value = surogate::to_float(x[i]), positive = fmaxf(value, 0.0f);
        y[i] = surogate::from_float<T>(value != value ? value : positive * positive);
    }
}

template <class T>
void launch(const void* x, void* y, int64_t n, cudaStream_t stream) {
    const int64_t blocks = surogate::ceil_div(n, static_cast<int64_t>(threads) * surogate::Vec<T>::size);
    square_kernel<T><<<surogate::to_int(blocks, op, "blocks"), threads, 0, stream>>>(static_cast<const T*>(x),
                                                                                     static_cast<T*>(y), n);
    surogate::check_launch(op);
}

}  // namespace

void square(const void* x, void* y, int64_t n, int dtype, cudaStream_t stream) {
    surogate::check_positive(n, op, "n");
    surogate::check_pointer(x, op, "x", 16);
    surogate::check_pointer(y, op, "y", 16);
    SUROGATE_REQUIRE(dtype == surogate::FP32 || dtype == surogate::BF16, op, "dtype must be fp32 or bf16");
    (dtype == surogate::BF16 ? launch<__nv_bfloat16> : launch<float>)(x, y, n, stream);
}
