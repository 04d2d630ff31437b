// Launchers of routes.cu, sigmoid_routes.cu, expert_order.cu and router_load.cu. dtype: that of logits and d_logits, FP32 or BF16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void route(const void* logits, void* weights, void* experts, int64_t tokens, int64_t n_experts, int64_t k, bool normalize,
           int dtype, cudaStream_t stream);

void route_bwd(const void* d_weights, const void* logits, const void* experts, void* d_logits, int64_t tokens,
               int64_t n_experts, int64_t k, bool normalize, int dtype, cudaStream_t stream);

// bias: null for none.
void sigmoid_route(const void* logits, const void* bias, void* weights, void* experts, int64_t tokens, int64_t n_experts,
                   int64_t k, int64_t groups, int64_t chosen_groups, bool normalize, double epsilon, double scale, int dtype,
                   cudaStream_t stream);

void sigmoid_route_bwd(const void* d_weights, const void* logits, const void* experts, void* d_logits, int64_t tokens,
                       int64_t n_experts, int64_t k, bool normalize, double epsilon, double scale, int dtype,
                       cudaStream_t stream);

// workspace: 4 n_experts bytes for each of 256 blocks at most.
void expert_order(const void* experts, void* order, void* place, void* ends, void* workspace, int64_t slots,
                  int64_t n_experts, cudaStream_t stream);

// before: null for none. workspace: 4 (n_experts + 1) bytes for each of 128 blocks at most.
void router_load(const void* logits, const void* experts, const void* targets, const void* before, void* load,
                 void* workspace, int64_t tokens, int64_t n_experts, int64_t k, int64_t layer, int64_t layers, bool adds,
                 int dtype, cudaStream_t stream);

}  // namespace surogate
