// Bindings of the launchers in branches.h: addresses as integers, the stream last.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "branches.h"

namespace nb = nanobind;

void bind_branches(nb::module_& m) {
    m.def(
        "lora_add",
        [](uintptr_t base, uintptr_t table, uintptr_t y, int64_t rows, int64_t width, int64_t branches, double scale,
           int dtype, uintptr_t stream) {
            surogate::lora_add(reinterpret_cast<const void*>(base), reinterpret_cast<const void*>(table),
                               reinterpret_cast<void*>(y), rows, width, branches, scale, dtype,
                               reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("base"), nb::arg("table"), nb::arg("y"), nb::arg("rows"), nb::arg("width"), nb::arg("branches"),
        nb::arg("scale"), nb::arg("dtype"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "lora_slice",
        [](uintptr_t x, uintptr_t out, int64_t rows, int64_t x_width, int64_t column, int64_t width, double scale,
           int dtype_x, int dtype_out, uintptr_t stream) {
            surogate::lora_slice(reinterpret_cast<const void*>(x), reinterpret_cast<void*>(out), rows, x_width, column,
                                 width, scale, dtype_x, dtype_out, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("x"), nb::arg("out"), nb::arg("rows"), nb::arg("x_width"), nb::arg("column"), nb::arg("width"),
        nb::arg("scale"), nb::arg("dtype_x"), nb::arg("dtype_out"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
