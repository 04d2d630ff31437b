// Cross-entropy of bf16 logits and its gradient on GPUs with thread block clusters (SM90 and newer), reading each logit
// once: a row stays in the registers of a cluster between the sum and the gradient.
//
// Arguments, formulas and the struct that says where the gradient goes are those of cross_entropy.cuh, without a cap. Its
// `store` takes the size of the vocabulary too, because the last vector of a row may go beyond it, and `store_one` is not
// needed. It may overwrite any logit of the row: all of them have been read.
//
// Exponents are fma(x, log2(e), -max), max in units of 1 / log2(e): one rounding, as precise as (x - max) - log(sum) for
// large logits. Gradients below 2^-126 are 0. The last vector of 8 logits of a row is read whole; elements from vocab_size
// on are ignored.
//
// Grid: a cluster of 1 to 8 thread blocks per row; a thread holds up to 10 vectors of 8 logits. The smallest cluster that
// holds the row is chosen, by the size of the vocabulary alone. A thread issues all its loads first, then sums exp2 of its
// logits relative to their maximum. Each warp writes its maximum and sum to the shared memory of every block of the
// cluster, one place per warp. After a barrier, each warp combines all of them in the same order, so results are
// bit-identical from run to run. So that loads, arithmetic and stores overlap, an SM has several blocks, with up to 164 KB
// of logits in registers.
#pragma once

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstring>
#include <utility>

#include "surogate/check.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace detail {

constexpr float log2_e = 1.44269504f;
constexpr float ln_2 = 0.693147181f;

// sum = sum of 2^(x log2(e) - max). A maximum of -FLT_MAX stands for "no logits".
struct Partial {
    float max;
    float sum;
};

using Logits = Packed<__nv_bfloat16>;  // 8 of them

__device__ __forceinline__ __nv_bfloat162 max_of(const Logits& logits) {
    __nv_bfloat162 pairs[4];
    memcpy(pairs, &logits.word, sizeof(pairs));
    return __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
}

// Replaces the logits from index `count` on by -inf.
__device__ __forceinline__ void cut(Logits& logits, int count) {
    constexpr uint32_t minus_infinity = 0xff80;
    uint32_t pairs[4];
    memcpy(pairs, &logits.word, sizeof(pairs));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = 2 * i < count ? pairs[i] & 0xffff : minus_infinity;
        const uint32_t high = 2 * i + 1 < count ? pairs[i] >> 16 : minus_infinity;
        pairs[i] = high << 16 | low;
    }
    memcpy(&logits.word, pairs, sizeof(pairs));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Combines the partial sums of a warp's lanes. Every lane receives the result.
__device__ __forceinline__ Partial warp_combine(Partial mine) {
    const float max = warp_max(mine.max);
    return {max, warp_sum(mine.sum * exp2_fast(mine.max - max))};
}

// A cluster of `blocks` thread blocks per row; a thread holds `held` vectors.
template <int threads, int blocks, int held, int blocks_per_sm, class Out>
__global__ void __launch_bounds__(threads, blocks_per_sm)
    cross_entropy_cluster_kernel(__nv_bfloat16* __restrict__ logits, const int* __restrict__ targets,
                                 const float* __restrict__ loss_scale, float* __restrict__ row_loss, const Out out,
                                 int vocab_size, int64_t ld) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    namespace cg = cooperative_groups;
    constexpr int warps = threads / 32;
    constexpr int stride = blocks * threads * 8;
    __shared__ Partial partials[blocks * warps];
    const cg::cluster_group cluster = cg::this_cluster();
    const int rank = static_cast<int>(cluster.block_rank());
    const int lane = threadIdx.x % 32;
    const int64_t row = blockIdx.x / blocks;
    __nv_bfloat16* x = logits + row * ld;
    const int first = (rank * threads + static_cast<int>(threadIdx.x)) * 8;
    const int target = targets[row];
    if (target < 0) {  // the whole cluster
        for (int at = first; at < vocab_size; at += stride) {
            float zeros[8] = {};
            out.store(x, row, at, zeros, 0.0f, vocab_size);
        }
        if (first == 0) {
            row_loss[row] = 0.0f;
        }
        return;
    }

    // Other blocks write to this block's shared memory after the wait, hence after it has started.
    auto arrival = cluster.barrier_arrive();
    Logits mine[held];
#pragma unroll
    for (int k = 0; k < held; ++k) {
        const int at = first + k * stride;
        if (at < vocab_size) {
            mine[k].word = __ldcg(reinterpret_cast<const uint4*>(x + at));
        }
    }
    const float loss_factor = *loss_scale;
    __nv_bfloat162 pair = __float2bfloat162_rn(-INFINITY);
#pragma unroll
    for (int k = 0; k < held; ++k) {
        const int at = first + k * stride;
        if (at + 8 > vocab_size) {
            cut(mine[k], vocab_size - at);
        }
        pair = __hmax2(pair, max_of(mine[k]));
    }
    // The maximum is finite, so that a logit of -inf contributes 0. A NaN does not become the maximum but propagates
    // through the sum.
    Partial partial{fmaxf(fmaxf(__low2float(pair), __high2float(pair)) * log2_e, -FLT_MAX), 0.0f};
#pragma unroll
    for (int k = 0; k < held; ++k) {
        float values[8];
        mine[k].to_float(values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            partial.sum += exp2_fast(fmaf(values[i], log2_e, -partial.max));
        }
    }
    partial = warp_combine(partial);
    cluster.barrier_wait(std::move(arrival));
    if (lane < blocks) {
        *cluster.map_shared_rank(partials + rank * warps + threadIdx.x / 32, lane) = partial;
    }
    cluster.sync();

    Partial total{-FLT_MAX, 0.0f};
#pragma unroll
    for (int i = 0; i < blocks * warps; i += 32) {
        const Partial other = i + lane < blocks * warps ? partials[i + lane] : Partial{-FLT_MAX, 0.0f};
        const float max = fmaxf(total.max, other.max);
        total = {max, total.sum * exp2_fast(total.max - max) + other.sum * exp2_fast(other.max - max)};
    }
    total = warp_combine(total);
    const int label = target < vocab_size ? target : -1;
    if (first == 0 && label < 0) {
        row_loss[row] = nanf("");
    }

    const float scale = out.scale(loss_factor), factor = scale / total.sum;
#pragma unroll
    for (int k = 0; k < held; ++k) {
        const int at = first + k * stride;
        const int index = label - at;
        const bool has_label = index >= 0 && index < 8;
        float values[8];
        mine[k].to_float(values);
        if (has_label) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i == index) {
                    row_loss[row] = (log2f(total.sum) + fmaf(-values[i], log2_e, total.max)) * ln_2;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[i] = exp2_fast(fmaf(values[i], log2_e, -total.max)) * factor;
        }
        if (has_label) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                values[i] -= i == index ? scale : 0.0f;
            }
        }
        if (at < vocab_size) {
            out.store(x, row, at, values, loss_factor, vocab_size);
        }
    }
#endif
}

}  // namespace detail

// Writes the elements `at` to `at` + 7 of a row in bf16 that are inside of it.
__device__ __forceinline__ void store_logits(__nv_bfloat16* x, int at, const float (&values)[8], int vocab_size) {
    if (at + 8 <= vocab_size) {
        detail::Logits::from_float(values).store(x + at);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (at + i < vocab_size) {
                x[at + i] = __float2bfloat16_rn(values[i]);
            }
        }
    }
}

// The caller has checked the arguments, and that `cluster_holds_row` (lm_head.h).
template <class Out>
void launch_cross_entropy_in_cluster(void* logits, const void* targets, const void* loss_scale, void* row_loss,
                                     const Out& out, int64_t rows, int64_t vocab_size, int64_t ld, const char* op,
                                     cudaStream_t stream) {
    using detail::cross_entropy_cluster_kernel;
    const auto run = [&](auto kernel, int threads, int blocks) {
        cudaLaunchAttribute cluster;
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(to_int(rows * blocks, op, "rows times blocks per row")));
        config.blockDim = dim3(static_cast<unsigned>(threads));
        config.stream = stream;
        config.attrs = &cluster;
        config.numAttrs = 1;
        check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<__nv_bfloat16*>(logits),
                                      static_cast<const int*>(targets), static_cast<const float*>(loss_scale),
                                      static_cast<float*>(row_loss), out, static_cast<int>(vocab_size), ld),
                   op);
    };
    if (vocab_size <= 20480) {
        run(cross_entropy_cluster_kernel<256, 1, 10, 4, Out>, 256, 1);
    } else if (vocab_size <= 40960) {
        run(cross_entropy_cluster_kernel<256, 2, 10, 4, Out>, 256, 2);
    } else if (vocab_size <= 81920) {
        run(cross_entropy_cluster_kernel<256, 4, 10, 4, Out>, 256, 4);
    } else if (vocab_size <= 131072) {
        run(cross_entropy_cluster_kernel<256, 8, 8, 4, Out>, 256, 8);
    } else if (vocab_size <= 163840) {
        run(cross_entropy_cluster_kernel<256, 8, 10, 4, Out>, 256, 8);
    } else {
        run(cross_entropy_cluster_kernel<512, 8, 8, 2, Out>, 512, 8);
    }
}

}  // namespace surogate
