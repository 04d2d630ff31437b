// Python binding of the launcher in adamw_8bit.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "adamw_8bit.h"

namespace nb = nanobind;

void bind_adamw_8bit(nb::module_& m) {
    m.def(
        "adamw_8bit",
        [](uintptr_t table, uintptr_t codes, uintptr_t clip_coef, uintptr_t lr, uintptr_t step, uintptr_t seed,
           uintptr_t workspace, int64_t workspace_bytes, int64_t tensors, int64_t chunks, int64_t chunk_size,
           double beta1, double beta2, double epsilon, uintptr_t stream) {
            surogate::adamw_8bit(reinterpret_cast<const void*>(table), reinterpret_cast<const void*>(codes),
                                 reinterpret_cast<const void*>(clip_coef), reinterpret_cast<const void*>(lr),
                                 reinterpret_cast<const void*>(step), reinterpret_cast<const void*>(seed),
                                 reinterpret_cast<void*>(workspace), workspace_bytes, tensors, chunks, chunk_size,
                                 beta1, beta2, epsilon, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("table"), nb::arg("codes"), nb::arg("clip_coef"), nb::arg("lr"), nb::arg("step"), nb::arg("seed"),
        nb::arg("workspace"), nb::arg("workspace_bytes"), nb::arg("tensors"), nb::arg("chunks"),
        nb::arg("chunk_size"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("epsilon"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
