// Launchers of the quantizers of single tensors and of activations with a gate (quantize.cu, swiglu.cu, geglu.cu,
// transpose.cu). The .cu files document formulas and layouts. Pointers to tensors are aligned to 16 bytes, rows and columns are multiples of 16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "scale.h"

namespace surogate {

struct Extent {
    int64_t rows, columns;
};

// dbias may be null; it is fp32, or bf16 without `accumulate`. `partials`: fp32 [ceil(rows / 64), columns] with dbias.
struct ColumnSums {
    void *dbias, *partials;
    int64_t partials_bytes;
    bool accumulate;
    int dtype;
};

void fp8_quantize(const void* x, void* q, void* q_t, const ColumnSums& sums, Extent size, int dtype_x, int format,
                  const Scale& scale, cudaStream_t stream);

void fp8_swiglu(const void* gate_up, void* q, void* q_t, void* out, Extent size, int format, const Scale& scale,
                cudaStream_t stream);

void fp8_geglu(const void* gate_up, void* q, void* q_t, void* out, Extent size, int format, const Scale& scale,
               cudaStream_t stream);

// A hidden activation that is quantized too: transposed, in the scale at `scale`. `hidden_t` may be null.
struct Hidden {
    void* hidden_t;
    const void* scale;
    int format;
};

void fp8_swiglu_bwd(const void* dout, const void* gate_up, void* q, void* q_t, void* dgate_up, const Hidden& hidden,
                    Extent size, int format, const Scale& scale, cudaStream_t stream);

void fp8_geglu_bwd(const void* dout, const void* gate_up, void* q, void* q_t, void* dgate_up, const Hidden& hidden,
                   Extent size, int format, const Scale& scale, cudaStream_t stream);

void fp8_transpose(const void* q, void* q_t, Extent size, int64_t ld, cudaStream_t stream);

void fp8_amax(const void* x, void* amax, Extent size, int dtype_x, cudaStream_t stream);

}  // namespace surogate
