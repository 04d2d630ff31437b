// Launchers of scale.cu; what their arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void dora_scale(const void* h, const void* norm, const void* m, const void* bias, void* y, int64_t rows, int64_t columns,
                int64_t stride, int dtype, int dtype_m, int dtype_bias, cudaStream_t stream);

void dora_scale_bwd(const void* dy, const void* h, const void* norm, const void* m, void* d_h, void* d_m, void* partials,
                    int64_t rows, int64_t columns, int64_t stride, int64_t slabs, int dtype, int dtype_m, int dtype_d_m,
                    int accumulates, cudaStream_t stream);

}  // namespace surogate
