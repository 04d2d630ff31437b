// Launchers of branches.cu; what their arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void lora_add(const void* base, const void* table, void* y, int64_t rows, int64_t width, int64_t branches,
              double scale, int dtype, cudaStream_t stream);
void lora_slice(const void* x, void* out, int64_t rows, int64_t x_width, int64_t column, int64_t width, double scale,
                int dtype_x, int dtype_out, cudaStream_t stream);

}  // namespace surogate
