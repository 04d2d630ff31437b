// The products of grouped_gemm.h whose weights are narrow, as A and B of adapters are, for SM80 and later.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// kind: `Grouped` of grouped_gemm.h, which describes the operands; dtype_d: BF16, or FP32 of wgrad. The narrow side has at most
// 32 columns: n in forward, k in dgrad, n or k in wgrad.
void grouped_narrow(const void* a, const void* b, const void* ends, void* d, int64_t rows, int64_t n, int64_t k,
                    int64_t experts, int kind, int dtype_d, bool accumulate, cudaStream_t stream);

}  // namespace surogate
