// Python bindings of the launchers in norms.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "norms.h"

namespace nb = nanobind;

void bind_norms(nb::module_& m) {
    m.def(
        "rmsnorm",
        [](uintptr_t x, uintptr_t w, uintptr_t norm, uintptr_t rstd, int64_t rows, int64_t columns, float eps,
           int dtype, uintptr_t stream) {
            surogate::rmsnorm(reinterpret_cast<const void*>(x), reinterpret_cast<const void*>(w),
                              reinterpret_cast<void*>(norm), reinterpret_cast<void*>(rstd), rows, columns, eps,
                              dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("x"), nb::arg("w"), nb::arg("norm"), nb::arg("rstd"), nb::arg("rows"), nb::arg("columns"),
        nb::arg("eps"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "add_rmsnorm",
        [](uintptr_t x, uintptr_t residual, uintptr_t w, uintptr_t norm, uintptr_t rstd, uintptr_t residual_out,
           int64_t rows, int64_t columns, float eps, int dtype, uintptr_t stream) {
            surogate::add_rmsnorm(reinterpret_cast<const void*>(x), reinterpret_cast<const void*>(residual),
                                  reinterpret_cast<const void*>(w), reinterpret_cast<void*>(norm),
                                  reinterpret_cast<void*>(rstd), reinterpret_cast<void*>(residual_out), rows,
                                  columns, eps, dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("x"), nb::arg("residual"), nb::arg("w"), nb::arg("norm"), nb::arg("rstd"), nb::arg("residual_out"),
        nb::arg("rows"), nb::arg("columns"), nb::arg("eps"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "rmsnorm_bwd",
        [](uintptr_t dy, uintptr_t x, uintptr_t w, uintptr_t rstd, uintptr_t dresidual, uintptr_t dx, uintptr_t dw,
           uintptr_t norm, uintptr_t workspace, int64_t workspace_bytes, int64_t rows, int64_t columns,
           bool accumulate_dw, int dtype, int dtype_dw, uintptr_t stream) {
            surogate::rmsnorm_bwd(reinterpret_cast<const void*>(dy), reinterpret_cast<const void*>(x),
                                  reinterpret_cast<const void*>(w), reinterpret_cast<const void*>(rstd),
                                  reinterpret_cast<const void*>(dresidual), reinterpret_cast<void*>(dx),
                                  reinterpret_cast<void*>(dw), reinterpret_cast<void*>(norm),
                                  reinterpret_cast<void*>(workspace), workspace_bytes, rows, columns, accumulate_dw,
                                  dtype, dtype_dw, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("dy"), nb::arg("x"), nb::arg("w"), nb::arg("rstd"), nb::arg("dresidual"), nb::arg("dx"),
        nb::arg("dw"), nb::arg("norm"), nb::arg("workspace"), nb::arg("workspace_bytes"), nb::arg("rows"), nb::arg("columns"),
        nb::arg("accumulate_dw"), nb::arg("dtype"), nb::arg("dtype_dw"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "rmsnorm_dgrad",
        [](uintptr_t dy, uintptr_t x, uintptr_t w, uintptr_t rstd, uintptr_t dresidual, uintptr_t dx, uintptr_t norm,
           int64_t rows, int64_t columns, int dtype, uintptr_t stream) {
            surogate::rmsnorm_dgrad(reinterpret_cast<const void*>(dy), reinterpret_cast<const void*>(x),
                                    reinterpret_cast<const void*>(w), reinterpret_cast<const void*>(rstd),
                                    reinterpret_cast<const void*>(dresidual), reinterpret_cast<void*>(dx),
                                    reinterpret_cast<void*>(norm), rows, columns, dtype,
                                    reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("dy"), nb::arg("x"), nb::arg("w"), nb::arg("rstd"), nb::arg("dresidual"), nb::arg("dx"), nb::arg("norm"),
        nb::arg("rows"), nb::arg("columns"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "linear_bgrad",
        [](uintptr_t dy, uintptr_t dbias, uintptr_t workspace, int64_t workspace_bytes, int64_t rows,
           int64_t columns, bool accumulate, int dtype, int dtype_dbias, uintptr_t stream) {
            surogate::linear_bgrad(reinterpret_cast<const void*>(dy), reinterpret_cast<void*>(dbias),
                                   reinterpret_cast<void*>(workspace), workspace_bytes, rows, columns, accumulate,
                                   dtype, dtype_dbias, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("dy"), nb::arg("dbias"), nb::arg("workspace"), nb::arg("workspace_bytes"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("accumulate"), nb::arg("dtype"), nb::arg("dtype_dbias"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
