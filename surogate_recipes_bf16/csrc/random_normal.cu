// out[i] = a normal deviate with mean 0 and deviation 1, from (block, 0) of Philox by Box and Muller; the same numbers in
// every call.
//
// out: fp32 or bf16 [size], any alignment of its dtype. For operands of products that are timed: their bits decide how
// much power a product takes. A thread writes eight elements. Not tuned: 1 GB takes a few ms, when an op is bound.
#include <surogate/philox.cuh>
#include <surogate/vec.cuh>

#include "dispatch.cuh"
#include "elementwise.h"

namespace surogate {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;

template <class T>
__global__ void __launch_bounds__(kThreads) random_normal_kernel(T* out, int64_t size) {
    const int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const PhiloxWords bits = random_halves(block, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
        const float radius = sqrtf(-2.0f * logf((static_cast<float>(bits.half(i)) + 1.0f) * 0x1p-16f));
        float sine, cosine;
        sincospif(static_cast<float>(bits.half(i + 1)) * 0x1p-15f, &sine, &cosine);
        const int64_t at = block * kElements + i;
        if (at < size) {
            out[at] = from_float<T>(radius * cosine);
        }
        if (at + 1 < size) {
            out[at + 1] = from_float<T>(radius * sine);
        }
    }
}

}  // namespace

void random_normal(void* out, int64_t size, int dtype, cudaStream_t stream) {
    check_positive(size, "random_normal", "size");
    with_float_type(dtype, "random_normal", "dtype", [&](auto type) {
        using T = typename decltype(type)::type;
        check_pointer(out, "random_normal", "out", sizeof(T));
        const int64_t blocks = ceil_div(ceil_div(size, kElements), kThreads);
        random_normal_kernel<T><<<static_cast<unsigned>(to_int(blocks, "random_normal", "size / threads")), kThreads, 0,
                                  stream>>>(static_cast<T*>(out), size);
    });
    check_launch("random_normal");
}

}  // namespace surogate
