// Binding of the launcher in wgrad.h: addresses as integers, the stream last.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "wgrad.h"

namespace nb = nanobind;

void bind_wgrad(nb::module_& m) {
    m.def(
        "lora_wgrad",
        [](uintptr_t table, uintptr_t workspace, int64_t workspace_bytes, int64_t strips, int64_t tiles, int64_t octets,
           int64_t rows, int64_t units, uintptr_t stream) {
            surogate::lora_wgrad(reinterpret_cast<const void*>(table), reinterpret_cast<void*>(workspace),
                                 workspace_bytes, strips, tiles, octets, rows, units,
                                 reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("table"), nb::arg("workspace"), nb::arg("workspace_bytes"), nb::arg("strips"), nb::arg("tiles"),
        nb::arg("octets"), nb::arg("rows"), nb::arg("units"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
