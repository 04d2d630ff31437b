// Launchers of geglu.cu, scale.cu, norm_add_rmsnorm.cu and norm_add_rmsnorm_bwd.cu, which document formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void geglu(const void* gate_up, void* out, int64_t rows, int64_t width, int dtype, cudaStream_t stream);

void geglu_bwd(const void* dout, const void* gate_up, void* dgate_up, int64_t rows, int64_t width, int dtype,
               cudaStream_t stream);

void scale(const void* x, void* out, int64_t size, double factor, int dtype, cudaStream_t stream);

void norm_add_rmsnorm(const void* y, const void* residual, const void* post_w, const void* w, void* norm, void* rstd,
                      void* residual_out, int64_t rows, int64_t columns, float eps, float offset, int dtype,
                      cudaStream_t stream);

void norm_add_rmsnorm_bwd(const void* dnorm, const void* total, const void* w, const void* rstd, const void* y,
                          const void* post_w, const void* dtotal, void* d_residual, void* d_y, void* dw, void* dpost_w,
                          void* norm, void* workspace, int64_t workspace_bytes, int64_t rows, int64_t columns,
                          float eps, float offset, bool accumulate_dw, bool accumulate_dpost_w, int dtype, int dtype_dw,
                          int dtype_dpost_w, cudaStream_t stream);

void norm_add_rmsnorm_dgrad(const void* dnorm, const void* total, const void* w, const void* rstd, const void* y,
                            const void* post_w, const void* dtotal, void* d_residual, void* d_y, void* norm,
                            int64_t rows, int64_t columns, float eps, float offset, int dtype, cudaStream_t stream);

}  // namespace surogate
