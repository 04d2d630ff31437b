// Launchers of ops on the scales and amax of all quantizers (scales.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void fp8_scales(const void* table, int64_t quantizers, float maximum, cudaStream_t stream);

void fp8_update(const void* table, const void* clip_coef, void* history, int64_t length, int64_t quantizers,
                cudaStream_t stream);

void fp8_guard(const void* table, void* norm, const void* clip_coef, void* guarded, int64_t quantizers,
               cudaStream_t stream);

}  // namespace surogate
