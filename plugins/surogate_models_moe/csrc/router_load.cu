// What is reported of a router, of the tokens with a label: row `layer` of load, fp32 [layers, E + 1], has the routes of each
// expert, and last the sum of the entropies in nats of softmax(logits). The other rows are those of `before` (null: 0).
//
//   logits [T,E], fp32 or bf16; experts [T,k] int32, each 0 to E - 1; targets [T] int32, below 0 without a label; before as load
//
// `load` may be `before`, and with `adds` the result is added to what it holds. All pointers are aligned to their element; E is
// at most 512, k at most 16. Arithmetic is fp32. Two kernels: the first counts and sums the tokens of each of at most 128
// blocks in the workspace [blocks, E + 1], a warp a token; the second adds these up. Counts are integers until then, and sums
// have a fixed order, so no result depends on time.
//
// Bytes a token in bf16: 2 E + 4 k + 4 read. 16,384 tokens of 128 experts: 4.8 MB, 1 us at 4.8 TB/s. 128 blocks take 16 rounds
// of a warp's latency, and the second kernel reads 128 rows: about 10 us for both.
#include <cuda_runtime.h>

#include <cmath>
#include <string>

#include "routes.cuh"
#include "routes.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

constexpr int most_blocks = 128;
constexpr int columns = 544;  // the most threads of the second kernel, a multiple of 32 that is at least 513

template <class T, int Each>
__global__ void __launch_bounds__(32 * warps)
    count_routes_kernel(const T* logits, const int32_t* experts, const int32_t* targets, float* of_blocks, int64_t tokens,
                        int n_experts, int k) {
    __shared__ int counts[32 * Each];
    __shared__ float entropies[warps];
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    for (int e = static_cast<int>(threadIdx.x); e < n_experts; e += 32 * warps) {
        counts[e] = 0;
    }
    __syncthreads();
    float entropy = 0.0f;  // of the tokens of this warp
    const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
    for (int64_t token = static_cast<int64_t>(blockIdx.x) * warps + warp; token < tokens; token += step) {
        if (targets[token] < 0) {
            continue;
        }
        if (lane < k) {
            atomicAdd(&counts[experts[token * k + lane]], 1);
        }
        float x[Each];
        float largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            const int e = lane + 32 * i;
            x[i] = e < n_experts ? to_float(logits[token * n_experts + e]) : -INFINITY;
            largest = fmaxf(largest, x[i]);
        }
        largest = warp_max(largest);
        float total = 0.0f, weighted = 0.0f;
#pragma unroll
        for (int i = 0; i < Each; ++i) {
            const float below = x[i] - largest, share = expf(below);
            total += share;
            weighted += share == 0.0f ? 0.0f : share * below;  // 0 beyond the experts
        }
        total = warp_sum(total);
        entropy += logf(total) - warp_sum(weighted) / total;
    }
    if (lane == 0) {
        entropies[warp] = entropy;
    }
    __syncthreads();
    float* mine = of_blocks + static_cast<int64_t>(blockIdx.x) * (n_experts + 1);
    for (int e = static_cast<int>(threadIdx.x); e < n_experts; e += 32 * warps) {
        mine[e] = static_cast<float>(counts[e]);
    }
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) {
            total += entropies[w];
        }
        mine[n_experts] = total;
    }
}

// A block writes a row of load, from `first` on.
__global__ void __launch_bounds__(columns)
    collect_load_kernel(const float* of_blocks, const float* before, float* load, int blocks, int width, int layer, int first,
                        bool adds) {
    const int row = first + static_cast<int>(blockIdx.x), column = static_cast<int>(threadIdx.x);
    if (column >= width) {
        return;
    }
    const int64_t at = static_cast<int64_t>(row) * width + column;
    float value = 0.0f;
    if (row != layer) {
        value = before == nullptr ? 0.0f : before[at];
    } else {
#pragma unroll 8
        for (int block = 0; block < blocks; ++block) {
            value += of_blocks[block * width + column];
        }
    }
    load[at] = adds ? load[at] + value : value;
}

}  // namespace

void router_load(const void* logits, const void* experts, const void* targets, const void* before, void* load,
                 void* workspace, int64_t tokens, int64_t n_experts, int64_t k, int64_t layer, int64_t layers, bool adds,
                 int dtype, cudaStream_t stream) {
    constexpr const char* op = "router_load";
    check_routes(op, tokens, n_experts, k, dtype);
    SUROGATE_REQUIRE(layer >= 0 && layer < layers, op, "layer must be below layers, got " + std::to_string(layer));
    SUROGATE_REQUIRE(!adds || before != load, op, "cannot add to before");
    check_pointer(logits, op, "logits", bytes_of(dtype));
    check_pointer(experts, op, "experts", 4);
    check_pointer(targets, op, "targets", 4);
    check_pointer(load, op, "load", 4);
    check_pointer(workspace, op, "workspace", 4);
    SUROGATE_REQUIRE(is_aligned(before, 4), op, "before must be aligned to 4 bytes");
    const int64_t needed = ceil_div(tokens, static_cast<int64_t>(warps));
    const int blocks = static_cast<int>(needed < most_blocks ? needed : most_blocks);
    const int e = static_cast<int>(n_experts), many = static_cast<int>(k);
    const int32_t* chosen = static_cast<const int32_t*>(experts);
    const int32_t* labels = static_cast<const int32_t*>(targets);
    float* partial = static_cast<float*>(workspace);
    with_logits(dtype, n_experts, [&](auto type, auto each) {
        using T = decltype(type);
        count_routes_kernel<T, decltype(each)::value>
            <<<blocks, 32 * warps, 0, stream>>>(static_cast<const T*>(logits), chosen, labels, partial, tokens, e, many);
    });
    check_launch(op);
    const int row = static_cast<int>(layer), rows = to_int(layers, op, "layers");
    const bool in_place = before == load;  // the other rows are there
    const int width = static_cast<int>(ceil_div(n_experts + 1, static_cast<int64_t>(32)) * 32);
    collect_load_kernel<<<in_place ? 1 : rows, width, 0, stream>>>(partial, static_cast<const float*>(before),
                                                                     static_cast<float*>(load), blocks, e + 1, row,
                                                                     in_place ? row : 0, adds);
    check_launch(op);
}

}  // namespace surogate
