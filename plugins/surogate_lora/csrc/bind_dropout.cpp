// Binding of the launcher in dropout.h: addresses as integers, the stream last.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "dropout.h"

namespace nb = nanobind;

void bind_dropout(nb::module_& m) {
    m.def(
        "lora_dropout",
        [](uintptr_t x, uintptr_t micro_step, uintptr_t seed, uintptr_t y, int64_t size, int64_t random_stream,
           int64_t dropped, double scale, int dtype, uintptr_t stream) {
            surogate::lora_dropout(reinterpret_cast<const void*>(x), reinterpret_cast<const void*>(micro_step),
                                   reinterpret_cast<const void*>(seed), reinterpret_cast<void*>(y), size, random_stream,
                                   dropped, scale, dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("x"), nb::arg("micro_step"), nb::arg("seed"), nb::arg("y"), nb::arg("size"), nb::arg("random_stream"),
        nb::arg("dropped"), nb::arg("scale"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
