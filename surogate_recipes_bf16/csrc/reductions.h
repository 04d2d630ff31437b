// Launchers of global_norm.cu and accumulate_rounded.cu, which document their arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void accumulate_rounded(const void* addend, const void* total, void* sum, const void* micro_step, const void* seed,
                        int64_t stream_id, int64_t size, int addend_dtype, cudaStream_t stream);

void global_norm(const void* table, void* norm, void* clip_coef, void* partials, int64_t tensors, int64_t chunks,
                 int64_t chunk_size, double max_norm, cudaStream_t stream);

}  // namespace surogate
