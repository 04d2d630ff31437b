// Launcher of pack.cu; what its arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void lora_move(const void* table, int64_t moves, int64_t largest, cudaStream_t stream);

}  // namespace surogate
