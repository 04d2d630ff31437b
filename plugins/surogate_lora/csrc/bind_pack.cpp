// Binding of the launcher in pack.h: addresses as integers, the stream last.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "pack.h"

namespace nb = nanobind;

void bind_pack(nb::module_& m) {
    m.def(
        "lora_move",
        [](uintptr_t table, int64_t moves, int64_t largest, uintptr_t stream) {
            surogate::lora_move(reinterpret_cast<const void*>(table), moves, largest,
                                reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("table"), nb::arg("moves"), nb::arg("largest"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
