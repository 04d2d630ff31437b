#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// Enqueues the kernel. `dtype` is a code of <surogate/dtype.h>.
void square(const void* x, void* y, int64_t n, int dtype, cudaStream_t stream);
