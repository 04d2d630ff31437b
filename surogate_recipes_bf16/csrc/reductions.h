// Launchers of gradient_norm.cu and accumulate_rounded.cu, which document their arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void accumulate_rounded(const void* addend, const void* total, void* sum, const void* micro_step, const void* seed,
                        int64_t stream_id, int64_t first, int64_t size, int addend_dtype, cudaStream_t stream);

void square_sums(const void* table, void* sums, int64_t tensors, int64_t chunks, cudaStream_t stream);

void norm_of_sums(const void* sums, const void* order, void* norm, void* clip_coef, int64_t count, double max_norm,
                  cudaStream_t stream);

}  // namespace surogate
