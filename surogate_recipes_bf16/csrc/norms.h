// Launchers of RMS norms (rmsnorm.cu, rmsnorm_bwd.cu) and of sums over rows (column_sum.cu). The .cu files document
// formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void rmsnorm(const void* x, const void* w, void* norm, void* rstd, int64_t rows, int64_t columns, float eps,
             float offset, int dtype, cudaStream_t stream);

void add_rmsnorm(const void* x, const void* residual, const void* w, void* norm, void* rstd, void* residual_out,
                 int64_t rows, int64_t columns, float eps, float offset, int dtype, cudaStream_t stream);

void rmsnorm_bwd(const void* dy, const void* x, const void* w, const void* rstd, const void* dresidual, void* dx,
                 void* dw, void* norm, void* workspace, int64_t workspace_bytes, int64_t rows, int64_t columns,
                 float offset, bool accumulate_dw, int dtype, int dtype_dw, cudaStream_t stream);

void rmsnorm_dgrad(const void* dy, const void* x, const void* w, const void* rstd, const void* dresidual, void* dx,
                   void* norm, int64_t rows, int64_t columns, float offset, int dtype, cudaStream_t stream);

void linear_bgrad(const void* dy, void* dbias, void* workspace, int64_t workspace_bytes, int64_t rows, int64_t columns,
                  bool accumulate, int dtype, int dtype_dbias, cudaStream_t stream);

}  // namespace surogate
