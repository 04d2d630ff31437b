// Sums and maxima over a warp or a block. Always in the same order: the same bits from run to run.
//
// Every thread of the warp (block) must call, and every thread gets the result. Blocks are one-dimensional, of a
// multiple of 32 threads. `scratch` is shared memory for 32 elements; a block reduction synchronises the block before
// it reads and before it returns, so the same scratch can be used again at once.
#pragma once

#include <cuda_runtime.h>

namespace surogate {

constexpr unsigned full_warp = 0xffffffffu;

struct Sum {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a + b;
    }
};

// NaN is kept: a maximum that loses it hides an error.
struct Max {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return (a > b || a != a) ? a : b;
    }
};

// Butterfly over Width neighbouring lanes (a power of two): with xor, all lanes of the group add the same pairs.
template <int Width = 32, class T, class Combine>
__device__ __forceinline__ T warp_reduce(T value, Combine combine) {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) {
        value = combine(value, __shfl_xor_sync(full_warp, value, offset));
    }
    return value;
}

// `identity` is what lanes beyond the number of warps contribute.
template <class T, class Combine>
__device__ __forceinline__ T block_reduce(T value, T* scratch, T identity, Combine combine) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warps = blockDim.x / 32;
    value = warp_reduce(value, combine);
    if (warps == 1) {
        return value;
    }
    if (lane == 0) {
        scratch[warp] = value;
    }
    __syncthreads();
    value = warp_reduce(lane < warps ? scratch[lane] : identity, combine);
    __syncthreads();
    return value;
}

template <int Width = 32, class T>
__device__ __forceinline__ T warp_sum(T value) {
    return warp_reduce<Width>(value, Sum{});
}

template <int Width = 32, class T>
__device__ __forceinline__ T warp_max(T value) {
    return warp_reduce<Width>(value, Max{});
}

template <class T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
    return block_reduce(value, scratch, T(0), Sum{});
}

// Of values that may all be negative: `lowest` is a value not above any of them, such as -INFINITY.
template <class T>
__device__ __forceinline__ T block_max(T value, T* scratch, T lowest) {
    return block_reduce(value, scratch, lowest, Max{});
}

}  // namespace surogate
