// Launchers of weighted_gate.cu, which documents formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void weighted_gate(const void* gate_up, const void* weights, const void* order, void* out, int64_t rows, int64_t width,
                double alpha, double limit, double offset, bool interleaved, cudaStream_t stream);

void weighted_gate_bwd(const void* dy, const void* gate_up, const void* weights, const void* order, void* d_gate_up,
                    void* d_weights, int64_t rows, int64_t width, double alpha, double limit, double offset, bool interleaved,
                    cudaStream_t stream);

}  // namespace surogate
