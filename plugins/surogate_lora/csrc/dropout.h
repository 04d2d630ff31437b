// Launcher of dropout.cu; what its arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void lora_dropout(const void* x, const void* micro_step, const void* seed, void* y, int64_t size, int64_t first,
                  int64_t random_stream, int64_t dropped, double scale, int dtype, cudaStream_t stream);

}  // namespace surogate
