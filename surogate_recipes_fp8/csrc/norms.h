// Launchers of RMS norms that quantize (rmsnorm.cu, rmsnorm_bwd.cu). The .cu files document formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "quantize.h"
#include "scale.h"

namespace surogate {

// residual and residual_out: both or neither. q_t and norm may be null.
struct RmsNorm {
    const void *x, *residual, *w;
    void *q, *q_t, *norm, *rstd, *residual_out;
    float eps;
};

void fp8_rmsnorm(const RmsNorm& tensors, Extent size, int format, const Scale& scale, cudaStream_t stream);

// dresidual, dw and q_t may be null. dw is fp32, or bf16 without accumulate_dw. With dw, `workspace` has
// fp32 [min(ceil(rows / 16), 512), columns].
struct RmsNormBwd {
    const void *dy, *x, *w, *rstd, *dresidual;
    void *dx, *dw, *q, *q_t, *workspace;
    int64_t workspace_bytes;
    bool accumulate_dw;
    int dtype_dw;
};

void fp8_rmsnorm_bwd(const RmsNormBwd& tensors, Extent size, int format, const Scale& scale, cudaStream_t stream);

}  // namespace surogate
