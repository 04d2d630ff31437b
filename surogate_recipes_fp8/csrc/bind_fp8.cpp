#include <surogate/bind.h>

#include "inexact.h"
#include "norms.h"
#include "numerics.h"
#include "quantize.h"
#include "scales.h"
#include "weighted_swiglu.h"

void bind_fp8(nanobind::module_& m) {
    using namespace surogate;
    bind_launcher(m, "fp8_quantize",
                  +[](const void* x, void* q, void* q_t, void* dbias, void* partials, int64_t partials_bytes,
                      int64_t rows, int64_t columns, bool accumulate, int dtype_dbias, int dtype_x, int format,
                      int scaling, const float* scale, float* amax, float* scale_out, float* measured,
                      cudaStream_t stream) {
                      fp8_quantize(x, q, q_t, {dbias, partials, partials_bytes, accumulate, dtype_dbias},
                                   {rows, columns}, dtype_x, format, {scaling, scale, amax, scale_out, measured},
                                   stream);
                  });
    bind_launcher(m, "fp8_transpose",
                  +[](const void* q, void* q_t, int64_t rows, int64_t columns, cudaStream_t stream) {
                      fp8_transpose(q, q_t, {rows, columns}, columns, stream);
                  });
    bind_launcher(m, "fp8_inexact", fp8_inexact);
    bind_launcher(m, "fp8_amax",
                  +[](const void* x, void* amax, int64_t rows, int64_t columns, int dtype_x, cudaStream_t stream) {
                      fp8_amax(x, amax, {rows, columns}, dtype_x, stream);
                  });
    bind_launcher(m, "fp8_swiglu",
                  +[](const void* gate_up, void* q, void* q_t, void* out, int64_t rows, int64_t width, int format,
                      int scaling, const float* scale, float* amax, float* scale_out, float* measured,
                      cudaStream_t stream) {
                      fp8_swiglu(gate_up, q, q_t, out, {rows, width}, format,
                                 {scaling, scale, amax, scale_out, measured}, stream);
                  });
    bind_launcher(m, "fp8_swiglu_bwd",
                  +[](const void* dout, const void* gate_up, void* q, void* q_t, void* dgate_up, void* hidden_t,
                      const void* hidden_scale, int hidden_format, int64_t rows, int64_t width, int format,
                      int scaling, const float* scale, float* amax, float* scale_out, float* measured,
                      cudaStream_t stream) {
                      fp8_swiglu_bwd(dout, gate_up, q, q_t, dgate_up, {hidden_t, hidden_scale, hidden_format},
                                     {rows, width}, format, {scaling, scale, amax, scale_out, measured}, stream);
                  });
    bind_launcher(m, "fp8_geglu",
                  +[](const void* gate_up, void* q, void* q_t, void* out, int64_t rows, int64_t width, int format,
                      int scaling, const float* scale, float* amax, float* scale_out, float* measured,
                      cudaStream_t stream) {
                      fp8_geglu(gate_up, q, q_t, out, {rows, width}, format,
                                 {scaling, scale, amax, scale_out, measured}, stream);
                  });
    bind_launcher(m, "fp8_geglu_bwd",
                  +[](const void* dout, const void* gate_up, void* q, void* q_t, void* dgate_up, void* hidden_t,
                      const void* hidden_scale, int hidden_format, int64_t rows, int64_t width, int format,
                      int scaling, const float* scale, float* amax, float* scale_out, float* measured,
                      cudaStream_t stream) {
                      fp8_geglu_bwd(dout, gate_up, q, q_t, dgate_up, {hidden_t, hidden_scale, hidden_format},
                                     {rows, width}, format, {scaling, scale, amax, scale_out, measured}, stream);
                  });
    bind_launcher(m, "fp8_weighted_swiglu",
                  +[](const void* gate_up, const void* weights, const void* order, void* q, void* out, int64_t rows,
                      int64_t width, double alpha, double limit, double offset, bool interleaved, int format, int scaling,
                      const float* scale, float* amax, float* scale_out, float* measured, cudaStream_t stream) {
                      fp8_weighted_swiglu({gate_up, weights, order, rows, width}, {alpha, limit, offset, interleaved}, q,
                                          out, format, {scaling, scale, amax, scale_out, measured}, stream);
                  });
    bind_launcher(m, "fp8_weighted_swiglu_bwd",
                  +[](const void* dout, const void* gate_up, const void* weights, const void* order, void* q,
                      void* dgate_up, void* d_weights, int64_t rows, int64_t width, double alpha, double limit,
                      double offset, bool interleaved, int format, int scaling, const float* scale, float* amax,
                      float* scale_out, float* measured, cudaStream_t stream) {
                      fp8_weighted_swiglu_bwd(dout, {gate_up, weights, order, rows, width},
                                              {alpha, limit, offset, interleaved}, q, dgate_up, d_weights, format,
                                              {scaling, scale, amax, scale_out, measured}, stream);
                  });
    bind_launcher(m, "fp8_rmsnorm",
                  +[](const void* x, const void* residual, const void* w, void* q, void* q_t, void* norm, void* rstd,
                      void* residual_out, int64_t rows, int64_t columns, float eps, int format, int scaling,
                      const float* scale, float* amax, float* scale_out, float* measured, cudaStream_t stream) {
                      fp8_rmsnorm({x, residual, w, q, q_t, norm, rstd, residual_out, eps}, {rows, columns}, format,
                                  {scaling, scale, amax, scale_out, measured}, stream);
                  });
    bind_launcher(m, "fp8_rmsnorm_bwd",
                  +[](const void* dy, const void* x, const void* w, const void* rstd, const void* dresidual, void* dx,
                      void* dw, void* q, void* q_t, void* workspace, int64_t workspace_bytes, int64_t rows,
                      int64_t columns, bool accumulate_dw, int dtype_dw, int format, int scaling, const float* scale,
                      float* amax, float* scale_out, float* measured, cudaStream_t stream) {
                      fp8_rmsnorm_bwd({dy, x, w, rstd, dresidual, dx, dw, q, q_t, workspace, workspace_bytes,
                                       accumulate_dw, dtype_dw},
                                      {rows, columns}, format, {scaling, scale, amax, scale_out, measured}, stream);
                  });
    bind_launcher(m, "fp8_scales", fp8_scales);
    bind_launcher(m, "fp8_update", fp8_update);
    bind_launcher(m, "fp8_guard", fp8_guard);
    bind_launcher(m, "fp8_count", fp8_count);
    bind_launcher(m, "fp8_report", fp8_report);
}
