// Launcher of move.cu; what its arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void dora_move(const void* from, void* to, int64_t from_stride, int64_t to_stride, int64_t rows, int64_t columns,
               int64_t first, int64_t width, double scale, int dtype_from, int dtype_to, int accumulates,
               cudaStream_t stream);

}  // namespace surogate
