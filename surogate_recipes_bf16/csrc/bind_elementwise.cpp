// Python bindings of the launchers in elementwise.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "elementwise.h"

namespace nb = nanobind;

void bind_elementwise(nb::module_& m) {
    m.def(
        "add",
        [](uintptr_t a, uintptr_t b, uintptr_t out, int64_t size, bool accumulate, int dtype, int dtype_out,
           uintptr_t stream) {
            surogate::add(reinterpret_cast<const void*>(a), reinterpret_cast<const void*>(b),
                          reinterpret_cast<void*>(out), size, accumulate, dtype, dtype_out,
                          reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("a"), nb::arg("b"), nb::arg("out"), nb::arg("size"), nb::arg("accumulate"), nb::arg("dtype"),
        nb::arg("dtype_out"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "cast",
        [](uintptr_t x, uintptr_t y, int64_t size, bool accumulate, int dtype_x, int dtype_y, uintptr_t stream) {
            surogate::cast(reinterpret_cast<const void*>(x), reinterpret_cast<void*>(y), size, accumulate, dtype_x,
                           dtype_y, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("x"), nb::arg("y"), nb::arg("size"), nb::arg("accumulate"), nb::arg("dtype_x"), nb::arg("dtype_y"),
        nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fill",
        [](uintptr_t out, int64_t size, double value, int dtype, uintptr_t stream) {
            surogate::fill(reinterpret_cast<void*>(out), size, value, dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("out"), nb::arg("size"), nb::arg("value"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "copy",
        [](uintptr_t x, uintptr_t y, int64_t n_bytes, uintptr_t stream) {
            surogate::copy(reinterpret_cast<const void*>(x), reinterpret_cast<void*>(y), n_bytes,
                           reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("x"), nb::arg("y"), nb::arg("n_bytes"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "commit",
        [](uintptr_t clip_coef, uintptr_t x, uintptr_t y, int64_t n_bytes, uintptr_t stream) {
            surogate::commit(reinterpret_cast<const void*>(clip_coef), reinterpret_cast<const void*>(x),
                             reinterpret_cast<void*>(y), n_bytes, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("clip_coef"), nb::arg("x"), nb::arg("y"), nb::arg("n_bytes"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "swiglu",
        [](uintptr_t gate_up, uintptr_t out, int64_t rows, int64_t width, int dtype, uintptr_t stream) {
            surogate::swiglu(reinterpret_cast<const void*>(gate_up), reinterpret_cast<void*>(out), rows, width,
                             dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("gate_up"), nb::arg("out"), nb::arg("rows"), nb::arg("width"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "swiglu_bwd",
        [](uintptr_t dout, uintptr_t gate_up, uintptr_t dgate_up, uintptr_t out, int64_t rows, int64_t width, int dtype,
           uintptr_t stream) {
            surogate::swiglu_bwd(reinterpret_cast<const void*>(dout), reinterpret_cast<const void*>(gate_up),
                                 reinterpret_cast<void*>(dgate_up), reinterpret_cast<void*>(out), rows, width, dtype,
                                 reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("dout"), nb::arg("gate_up"), nb::arg("dgate_up"), nb::arg("out"), nb::arg("rows"), nb::arg("width"),
        nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "embedding",
        [](uintptr_t tokens, uintptr_t w, uintptr_t out, int64_t n_tokens, int64_t vocab_size, int64_t columns,
           int dtype, uintptr_t stream) {
            surogate::embedding(reinterpret_cast<const void*>(tokens), reinterpret_cast<const void*>(w),
                                reinterpret_cast<void*>(out), n_tokens, vocab_size, columns, dtype,
                                reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("tokens"), nb::arg("w"), nb::arg("out"), nb::arg("n_tokens"), nb::arg("vocab_size"),
        nb::arg("columns"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "embedding_bwd",
        [](uintptr_t dout, uintptr_t tokens, uintptr_t dw, uintptr_t workspace, int64_t workspace_bytes,
           int64_t n_tokens, int64_t vocab_size, int64_t columns, bool accumulate, int dtype, int dtype_dw,
           uintptr_t stream) {
            surogate::embedding_bwd(reinterpret_cast<const void*>(dout), reinterpret_cast<const void*>(tokens),
                                    reinterpret_cast<void*>(dw), reinterpret_cast<void*>(workspace), workspace_bytes,
                                    n_tokens, vocab_size, columns, accumulate, dtype, dtype_dw,
                                    reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("dout"), nb::arg("tokens"), nb::arg("dw"), nb::arg("workspace"), nb::arg("workspace_bytes"),
        nb::arg("n_tokens"), nb::arg("vocab_size"), nb::arg("columns"), nb::arg("accumulate"), nb::arg("dtype"),
        nb::arg("dtype_dw"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
