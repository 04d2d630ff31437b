// The kernels of losses of groups of documents, such as pairs. A loss is a struct of pointers and options with
//
//   static constexpr int documents;                                           of a group
//   static constexpr int n_figures;                                           its loss first
//   __device__ bool figures(int64_t group, float (&values)[n_figures]) const  false: no group
//   __device__ bool gradient(int64_t group, float (&d_sums)[documents]) const the gradient of its loss; false: no group
//
// sum_figures     of[i] (+)= scale * sum over groups of values[i]. One block, because groups are few and the launch is the
//                 cost; its order is fixed. Bit i of `adds`: the sum is added to what is there.
// group_gradients d_sums [groups, documents] = scale * d_loss * the gradients, 0 where there is no group. A thread per group.
//
// All is fp32; scale, d_loss and the sums are scalars in device memory.
#pragma once

#include <surogate/reduce.cuh>
#include <surogate/sigmoid.cuh>

#include <cstdint>

namespace surogate {

constexpr int group_threads = 256;

template <int n>
struct Figures {
    float* of[n];
};

// Bits of `adds` for figures of which the last output holds `count`: bit `last` of `outputs` stands for all of them.
inline int spread(int outputs, int last, int count) {
    const int scalars = outputs & ((1 << last) - 1);
    return (outputs >> last) & 1 ? scalars | (((1 << count) - 1) << last) : scalars;
}

// log(sigmoid(x)), without overflow.
__device__ __forceinline__ float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }

template <class Loss>
__global__ void __launch_bounds__(group_threads)
    sum_figures_kernel(Loss loss, const float* scale, Figures<Loss::n_figures> sums, int64_t groups, int adds) {
    constexpr int n_figures = Loss::n_figures;
    __shared__ float scratch[32];
    float total[n_figures] = {};
    for (int64_t group = threadIdx.x; group < groups; group += group_threads) {
        float values[n_figures];
        if (loss.figures(group, values)) {
#pragma unroll
            for (int i = 0; i < n_figures; ++i) {
                total[i] += values[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < n_figures; ++i) {
        const float sum = *scale * block_sum(total[i], scratch);
        if (threadIdx.x == 0) {
            *sums.of[i] = (adds >> i) & 1 ? *sums.of[i] + sum : sum;
        }
    }
}

template <class Loss>
__global__ void __launch_bounds__(group_threads)
    group_gradients_kernel(Loss loss, const float* scale, const float* d_loss, float* d_sums, int64_t groups) {
    const int64_t group = static_cast<int64_t>(blockIdx.x) * group_threads + threadIdx.x;
    if (group >= groups) {
        return;
    }
    float gradient[Loss::documents];
    const bool used = loss.gradient(group, gradient);
#pragma unroll
    for (int i = 0; i < Loss::documents; ++i) {
        d_sums[group * Loss::documents + i] = used ? *scale * *d_loss * gradient[i] : 0.0f;
    }
}

}  // namespace surogate
