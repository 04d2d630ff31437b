// Launchers of geglu.cu and scale.cu, which document formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void geglu(const void* gate_up, void* out, int64_t rows, int64_t width, int dtype, cudaStream_t stream);

void geglu_bwd(const void* dout, const void* gate_up, void* dgate_up, int64_t rows, int64_t width, int dtype,
               cudaStream_t stream);

void scale(const void* x, void* out, int64_t size, double factor, int dtype, cudaStream_t stream);

}  // namespace surogate
