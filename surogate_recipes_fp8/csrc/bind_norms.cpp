// Python bindings of the launchers in norms.h. Pointers are passed as integers; the stream is the last argument, after
// the five arguments of a scale (scale.h).
#include <nanobind/nanobind.h>

#include "bind.h"
#include "norms.h"

namespace nb = nanobind;
using namespace surogate;

void bind_norms(nb::module_& m) {
    m.def(
        "fp8_rmsnorm",
        [](Address x, Address residual, Address w, Address q, Address q_t, Address norm, Address rstd,
           Address residual_out, int64_t rows, int64_t columns, float eps, int format, SUROGATE_SCALE_PARAMETERS,
           Address stream) {
            fp8_rmsnorm({pointer(x), pointer(residual), pointer(w), pointer(q), pointer(q_t), pointer(norm),
                         pointer(rstd), pointer(residual_out), eps},
                        {rows, columns}, format, SUROGATE_SCALE, stream_of(stream));
        },
        nb::arg("x"), nb::arg("residual"), nb::arg("w"), nb::arg("q"), nb::arg("q_t"), nb::arg("norm"), nb::arg("rstd"),
        nb::arg("residual_out"), nb::arg("rows"), nb::arg("columns"), nb::arg("eps"), nb::arg("format"),
        SUROGATE_SCALE_NAMES, nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fp8_rmsnorm_bwd",
        [](Address dy, Address x, Address w, Address rstd, Address dresidual, Address dx, Address dw, Address q,
           Address q_t, Address workspace, int64_t workspace_bytes, int64_t rows, int64_t columns, bool accumulate_dw,
           int dtype_dw, int format, SUROGATE_SCALE_PARAMETERS, Address stream) {
            fp8_rmsnorm_bwd({pointer(dy), pointer(x), pointer(w), pointer(rstd), pointer(dresidual), pointer(dx),
                             pointer(dw), pointer(q), pointer(q_t), pointer(workspace), workspace_bytes, accumulate_dw,
                             dtype_dw},
                            {rows, columns}, format, SUROGATE_SCALE, stream_of(stream));
        },
        nb::arg("dy"), nb::arg("x"), nb::arg("w"), nb::arg("rstd"), nb::arg("dresidual"), nb::arg("dx"), nb::arg("dw"),
        nb::arg("q"), nb::arg("q_t"), nb::arg("workspace"), nb::arg("workspace_bytes"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("accumulate_dw"), nb::arg("dtype_dw"), nb::arg("format"),
        SUROGATE_SCALE_NAMES, nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
}
