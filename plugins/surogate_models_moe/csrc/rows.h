// Launchers of rows.cu and gate_rows.cu. All tensors but weights and indices are bf16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void gather_rows(const void* x, const void* place, void* y, int64_t tokens, int64_t k, int64_t width, cudaStream_t stream);

void sum_rows(const void* y, const void* place, void* out, int64_t tokens, int64_t k, int64_t width, cudaStream_t stream);

void weighted_swiglu(const void* gate_up, const void* weights, const void* order, void* out, int64_t rows, int64_t width,
                     cudaStream_t stream);

void weighted_swiglu_bwd(const void* dy, const void* gate_up, const void* weights, const void* order, void* d_gate_up,
                         void* d_weights, int64_t rows, int64_t width, cudaStream_t stream);

void gate_rows(const void* x, const void* gate, void* y, int64_t rows, int64_t width, cudaStream_t stream);

void gate_rows_bwd(const void* dy, const void* x, const void* gate, void* dx, void* d_gate, int64_t rows, int64_t width,
                   cudaStream_t stream);

}  // namespace surogate
