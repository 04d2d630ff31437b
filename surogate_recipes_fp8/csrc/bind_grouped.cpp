// Python binding of grouped_fp8.h. Pointers are passed as integers; the stream is the last argument.
#include <surogate/bind.h>

#include <cstdint>
#include <new>

#include "grouped_fp8.h"

namespace nb = nanobind;

void bind_grouped(nb::module_& m) {
    using surogate::GroupedFp8;
    nb::class_<GroupedFp8>(m, "GroupedFp8")
        .def(
            "__init__",
            [](GroupedFp8* self, uintptr_t a, uintptr_t b, uintptr_t scale_a, uintptr_t scale_b, uintptr_t ends, uintptr_t a2,
               uintptr_t b2, uintptr_t bias, uintptr_t d, uintptr_t workspace, int64_t rows, int64_t width, int64_t terms,
               int64_t groups, int dtype_a, int dtype_b, bool beside, bool fast, int64_t terms2, int64_t begin) {
                const surogate::GroupedFp8Buffers buffers{
                    reinterpret_cast<const void*>(a),        reinterpret_cast<const void*>(b),
                    reinterpret_cast<const float*>(scale_a), reinterpret_cast<const float*>(scale_b),
                    reinterpret_cast<const int32_t*>(ends),  reinterpret_cast<const void*>(a2),
                    reinterpret_cast<const void*>(b2),       reinterpret_cast<const void*>(bias),
                    reinterpret_cast<void*>(d),              reinterpret_cast<void*>(workspace)};
                new (self) GroupedFp8({rows, width, terms, groups, dtype_a, dtype_b, beside, fast, terms2, begin}, buffers);
            },
            nb::arg("a"), nb::arg("b"), nb::arg("scale_a"), nb::arg("scale_b"), nb::arg("ends"), nb::arg("a2"),
            nb::arg("b2"), nb::arg("bias"), nb::arg("d"), nb::arg("workspace"), nb::arg("rows"), nb::arg("width"),
            nb::arg("terms"), nb::arg("groups"), nb::arg("dtype_a"), nb::arg("dtype_b"), nb::arg("beside"), nb::arg("fast"),
            nb::arg("terms2"), nb::arg("begin"))
        .def(
            "run", [](const GroupedFp8& self, uintptr_t stream) { self.run(reinterpret_cast<cudaStream_t>(stream)); },
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def("grouped_fp8_workspace", &GroupedFp8::workspace_bytes, nb::arg("groups"));
}
