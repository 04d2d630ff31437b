// Launchers of the numerics report (numerics.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void fp8_count(const void* x, const void* scale, void* amax, void* counts, int64_t elements, float clipped,
               float lost, cudaStream_t stream);

void fp8_report(const void* table, const void* history, void* out, int64_t tensors, int64_t length, int64_t quantizers,
                cudaStream_t stream);

}  // namespace surogate
