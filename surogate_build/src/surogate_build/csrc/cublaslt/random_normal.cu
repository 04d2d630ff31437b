// out[i] = a normal deviate with mean 0 and deviation `random_deviation(dtype)`, from (block, 0) of Philox by Box and
// Muller; the same numbers in every call.
//
// out: fp32, bf16, e4m3, e5m2 or packed e2m1 [size], any alignment of its dtype. A thread writes eight elements. Not
// tuned: 1 GB takes a few ms, when an op is bound.
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include <surogate/check.h>
#include <surogate/dtype.h>
#include <surogate/gemm.h>
#include <surogate/philox.cuh>
#include <surogate/vec.cuh>

namespace surogate {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;

template <class T>
__device__ T rounded(float x) {
    return from_float<T>(x);
}
template <>
__device__ __nv_fp8_e4m3 rounded(float x) {
    return __nv_fp8_e4m3(x);
}
template <>
__device__ __nv_fp8_e5m2 rounded(float x) {
    return __nv_fp8_e5m2(x);
}

// Writes elements `at` and `at + 1`.
template <class T>
__device__ void store(T* out, int64_t at, int64_t size, float x, float y) {
    if (at < size) {
        out[at] = rounded<T>(x);
    }
    if (at + 1 < size) {
        out[at + 1] = rounded<T>(y);
    }
}
template <>
__device__ void store(__nv_fp4x2_storage_t* out, int64_t at, int64_t size, float x, float y) {
    if (at < size) {
        out[at / 2] = __nv_cvt_float2_to_fp4x2(make_float2(x, y), __NV_E2M1, cudaRoundNearest);
    }
}

template <class T>
__global__ void __launch_bounds__(kThreads) random_normal_kernel(T* out, int64_t size, float deviation) {
    const int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const PhiloxWords bits = random_halves(block, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
        const float radius =
            deviation * sqrtf(-2.0f * logf((static_cast<float>(bits.half(i)) + 1.0f) * 0x1p-16f));
        float sine, cosine;
        sincospif(static_cast<float>(bits.half(i + 1)) * 0x1p-15f, &sine, &cosine);
        store(out, block * kElements + i, size, radius * cosine, radius * sine);
    }
}

template <class T>
void launch(void* out, int64_t size, int dtype, cudaStream_t stream) {
    check_pointer(out, "random_normal", "out", sizeof(T));
    const int64_t blocks = ceil_div(ceil_div(size, kElements), kThreads);
    random_normal_kernel<T><<<static_cast<unsigned>(to_int(blocks, "random_normal", "size / threads")), kThreads, 0,
                              stream>>>(static_cast<T*>(out), size, random_deviation(dtype));
    check_launch("random_normal");
}

}  // namespace

// Powers of two. The largest deviate is 4.7 times the deviation, which fits in the dtype, but for E2M1: its largest number
// takes the place of the 0.3 % beyond it.
float random_deviation(int dtype) {
    switch (dtype) {
        case E4M3:
            return 64.0f;
        case E5M2:
            return 8192.0f;
        case E2M1:
            return 2.0f;
        default:
            return 1.0f;
    }
}

void random_normal(void* out, int64_t size, int dtype, cudaStream_t stream) {
    check_positive(size, "random_normal", "size");
    switch (dtype) {
        case FP32:
            return launch<float>(out, size, dtype, stream);
        case BF16:
            return launch<__nv_bfloat16>(out, size, dtype, stream);
        case E4M3:
            return launch<__nv_fp8_e4m3>(out, size, dtype, stream);
        case E5M2:
            return launch<__nv_fp8_e5m2>(out, size, dtype, stream);
        case E2M1:
            SUROGATE_REQUIRE(size % 2 == 0, "random_normal", "size must be even, got " + std::to_string(size));
            return launch<__nv_fp4x2_storage_t>(out, size, dtype, stream);
        default:
            SUROGATE_REQUIRE(false, "random_normal", std::string("has no numbers in ") + name_of(dtype));
    }
}

}  // namespace surogate
