// Parts of the backward pass of the gated delta rule (delta.h), in their order.
#pragma once

#include "delta_tile.cuh"

namespace surogate::delta {

// Writes dR and the gradient of the state behind each chunk.
void scan_bwd(const T* dout, const Prepared& prepared, const Sizes& sizes, T* d_rest, T* d_states, cudaStream_t stream);

// partial: fp32 [T / 64, Hv, 2], the shares of each chunk in da_log and ddt_bias.
struct Gradients {
    T *qkv, *ba;
    float* partial;
};

// Computes everything else, a chunk by itself. shared_memory: see gated_delta_rule_bwd().
void chunks_bwd(const T* dout, const Inputs& inputs, const Prepared& prepared, const Sizes& sizes, const T* states,
                const T* d_rest, const T* d_states, const Gradients& gradients, int64_t shared_memory, cudaStream_t stream);

}  // namespace surogate::delta
