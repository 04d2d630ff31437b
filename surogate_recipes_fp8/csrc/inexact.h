// Launcher of inexact.cu, which documents the formula.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// codes: `blocks` times 16 bytes; scales: a byte each; amax: fp32 [matrices,2]; count: int32.
void fp8_inexact(const void* codes, const void* scales, const void* amax, void* count, int64_t blocks, int64_t matrices,
                 cudaStream_t stream);

}  // namespace surogate
