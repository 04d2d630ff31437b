// Launcher of row_norms.cu; what its arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void dora_row_norms(const void* weight, const void* down, const void* up, void* norm, int64_t rows, int64_t columns,
                    int64_t ranks, int dtype_weight, int dtype_matrices, int dtype_norm, cudaStream_t stream);

}  // namespace surogate
