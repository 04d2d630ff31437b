// Python bindings of the launchers in quantize.h. Pointers are passed as integers; the stream is the last argument, after
// the five arguments of a scale (scale.h).
#include <nanobind/nanobind.h>

#include "bind.h"
#include "quantize.h"

namespace nb = nanobind;
using namespace surogate;

void bind_quantize(nb::module_& m) {
    m.def(
        "fp8_quantize",
        [](Address x, Address q, Address q_t, Address dbias, Address partials, int64_t partials_bytes, int64_t rows,
           int64_t columns, bool accumulate, int dtype_dbias, int dtype_x, int format, SUROGATE_SCALE_PARAMETERS,
           Address stream) {
            fp8_quantize(pointer(x), pointer(q), pointer(q_t),
                         {pointer(dbias), pointer(partials), partials_bytes, accumulate, dtype_dbias},
                         {rows, columns}, dtype_x, format, SUROGATE_SCALE, stream_of(stream));
        },
        nb::arg("x"), nb::arg("q"), nb::arg("q_t"), nb::arg("dbias"), nb::arg("partials"), nb::arg("partials_bytes"),
        nb::arg("rows"), nb::arg("columns"), nb::arg("accumulate"), nb::arg("dtype_dbias"), nb::arg("dtype_x"),
        nb::arg("format"), SUROGATE_SCALE_NAMES, nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fp8_swiglu",
        [](Address gate_up, Address q, Address q_t, Address out, int64_t rows, int64_t width, int format,
           SUROGATE_SCALE_PARAMETERS, Address stream) {
            fp8_swiglu(pointer(gate_up), pointer(q), pointer(q_t), pointer(out), {rows, width}, format, SUROGATE_SCALE,
                       stream_of(stream));
        },
        nb::arg("gate_up"), nb::arg("q"), nb::arg("q_t"), nb::arg("out"), nb::arg("rows"), nb::arg("width"),
        nb::arg("format"), SUROGATE_SCALE_NAMES, nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fp8_swiglu_bwd",
        [](Address dout, Address gate_up, Address q, Address q_t, Address dgate_up, Address hidden_t,
           Address hidden_scale, int hidden_format, int64_t rows, int64_t width, int format, SUROGATE_SCALE_PARAMETERS,
           Address stream) {
            fp8_swiglu_bwd(pointer(dout), pointer(gate_up), pointer(q), pointer(q_t), pointer(dgate_up),
                           {pointer(hidden_t), pointer(hidden_scale), hidden_format}, {rows, width}, format,
                           SUROGATE_SCALE, stream_of(stream));
        },
        nb::arg("dout"), nb::arg("gate_up"), nb::arg("q"), nb::arg("q_t"), nb::arg("dgate_up"), nb::arg("hidden_t"),
        nb::arg("hidden_scale"), nb::arg("hidden_format"), nb::arg("rows"), nb::arg("width"), nb::arg("format"),
        SUROGATE_SCALE_NAMES, nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fp8_transpose",
        [](Address q, Address q_t, int64_t rows, int64_t columns, Address stream) {
            fp8_transpose(pointer(q), pointer(q_t), {rows, columns}, stream_of(stream));
        },
        nb::arg("q"), nb::arg("q_t"), nb::arg("rows"), nb::arg("columns"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fp8_amax",
        [](Address x, Address amax, int64_t rows, int64_t columns, int dtype_x, Address stream) {
            fp8_amax(pointer(x), pointer(amax), {rows, columns}, dtype_x, stream_of(stream));
        },
        nb::arg("x"), nb::arg("amax"), nb::arg("rows"), nb::arg("columns"), nb::arg("dtype_x"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
