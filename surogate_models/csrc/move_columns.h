// Launcher of move_columns.cpp, which documents its arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void move_columns(const void* x, void* y, int64_t rows, int64_t width, int64_t x_stride, int64_t y_stride, int64_t x_at,
                  int64_t y_at, cudaStream_t stream);

}  // namespace surogate
