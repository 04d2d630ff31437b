// Launcher of wgrad.cu; what its arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void lora_wgrad(const void* table, void* workspace, int64_t workspace_bytes, int64_t strips, int64_t tiles,
                int64_t octets, int64_t rows, int64_t units, cudaStream_t stream);

}  // namespace surogate
