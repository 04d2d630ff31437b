// Sums and maxima over a warp or a block. The order is fixed, so results are bit-identical from run to run.
//
// Every thread of the warp (block) must call the function, and every thread receives the result. Blocks must be
// one-dimensional with a multiple of 32 threads. `scratch` is shared memory for 32 elements. A block reduction
// synchronizes the block before it reads `scratch` and before it returns, so `scratch` can be reused immediately.
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

// Propagates NaN, because a maximum that drops it would hide an error.
struct Max {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return (a > b || a != a) ? a : b;
    }
};

// Butterfly reduction over Width adjacent lanes (a power of two). With xor shuffles, all lanes combine the same pairs.
template <int Width = 32, class T, class Combine>
__device__ __forceinline__ T warp_reduce(T value, Combine combine) {
#pragma unroll
    for (int offset = Width / 2; offset > 0; offset /= 2) {
        value = combine(value, __shfl_xor_sync(full_warp, value, offset));
    }
    return value;
}

// `identity` is the contribution of lanes beyond the number of warps.
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

// `lowest` is a lower bound of all values, such as -INFINITY.
template <class T>
__device__ __forceinline__ T block_max(T value, T* scratch, T lowest) {
    return block_reduce(value, scratch, lowest, Max{});
}

}  // namespace surogate
