// Launchers of expert_bias.cu, which documents formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void add_expert_bias(const void* y, const void* weights, const void* experts, const void* bias, void* out, int64_t tokens,
                     int64_t k, int64_t width, cudaStream_t stream);

void expert_bias_dgrad(const void* dy, const void* experts, const void* bias, void* d_weights, int64_t tokens, int64_t k,
                       int64_t width, cudaStream_t stream);

void expert_bias_grad(const void* dy, const void* weights, const void* experts, void* d_bias, int64_t tokens, int64_t k,
                      int64_t width, int64_t n_experts, bool accumulate, int dtype_d_bias, cudaStream_t stream);

void grouped_linear_bgrad(const void* dy, const void* ends, void* d_bias, int64_t rows, int64_t width, int64_t n_experts,
                          bool accumulate, int dtype_d_bias, cudaStream_t stream);

}  // namespace surogate
