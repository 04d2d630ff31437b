// The products of grouped_gemm.h on every GPU from SM80 on, by mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// kind: `Grouped` of grouped_gemm.h, which describes the operands; dtype_d: BF16, or FP32 of wgrad.
// bias: of forward, or nullptr. begin, of: those of GroupedShape.
void grouped_mma(const void* a, const void* b, const void* ends, const void* bias, void* d, int64_t rows, int64_t n, int64_t k,
                 int64_t experts, int kind, int dtype_d, bool accumulate, int64_t begin, int64_t of, cudaStream_t stream);

}  // namespace surogate
