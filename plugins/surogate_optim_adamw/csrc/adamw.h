// Launcher of adamw.cu, which documents its arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void adamw(const void* table, const void* clip_coef, const void* lr, const void* step, const void* seed, void* workspace,
           int64_t workspace_bytes, int64_t tensors, int64_t chunks, int64_t chunk_size, double beta1, double beta2,
           double epsilon, cudaStream_t stream);

}  // namespace surogate
