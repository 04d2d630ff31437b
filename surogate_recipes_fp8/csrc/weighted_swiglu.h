// Launchers of weighted_swiglu.cu, which documents formulas and layouts. `out` and `dgate_up` may be null.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "scale.h"

namespace surogate {

// The rows of experts: gate_up [rows, 2 width] in bf16, weights fp32 and order int32 with a number for each row.
struct WeightedRows {
    const void *gate_up, *weights, *order;
    int64_t rows, width;
};

// The form of the gate, by the attributes of the ops. SwiGLU: alpha 1, limit and offset 0, not interleaved.
struct GateForm {
    double alpha, limit, offset;
    bool interleaved;
};

void fp8_weighted_swiglu(const WeightedRows& in, const GateForm& form, void* q, void* out, int format,
                         const Scale& scale, cudaStream_t stream);

void fp8_weighted_swiglu_bwd(const void* dout, const WeightedRows& in, const GateForm& form, void* q, void* dgate_up,
                             void* d_weights, int format, const Scale& scale, cudaStream_t stream);

}  // namespace surogate
