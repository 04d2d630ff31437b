// Python bindings of grouped_gemm.h, grouped_mma.h, grouped_narrow.h and grouped_thin.h. Pointers are passed as integers; the
// stream is the last argument.
#include <surogate/bind.h>

#include <cstdint>
#include <new>

#include "grouped_gemm.h"
#include "grouped_mma.h"
#include "grouped_narrow.h"
#include "grouped_thin.h"

namespace nb = nanobind;

void bind_grouped(nb::module_& m) {
    using surogate::GroupedGemm;
    nb::class_<GroupedGemm>(m, "GroupedGemm")
        .def(
            "__init__",
            [](GroupedGemm* self, uintptr_t a, uintptr_t b, uintptr_t ends, uintptr_t a2, uintptr_t b2, uintptr_t d,
               uintptr_t workspace, int64_t rows, int64_t n, int64_t k, int64_t experts, int kind, int dtype_d,
               bool accumulate, int64_t terms2, uintptr_t bias, int64_t begin, int64_t of) {
                const auto at = [](uintptr_t pointer) { return reinterpret_cast<const void*>(pointer); };
                const surogate::GroupedBuffers buffers{at(a),
                                                       at(b),
                                                       at(a2),
                                                       at(b2),
                                                       at(bias),
                                                       reinterpret_cast<const int32_t*>(ends),
                                                       reinterpret_cast<void*>(d),
                                                       reinterpret_cast<void*>(workspace)};
                new (self) GroupedGemm({rows, n, k, experts, kind, dtype_d, accumulate, terms2, begin, of}, buffers);
            },
            nb::arg("a"), nb::arg("b"), nb::arg("ends"), nb::arg("a2"), nb::arg("b2"), nb::arg("d"), nb::arg("workspace"),
            nb::arg("rows"), nb::arg("n"), nb::arg("k"), nb::arg("experts"), nb::arg("kind"), nb::arg("dtype_d"),
            nb::arg("accumulate"), nb::arg("terms2"), nb::arg("bias"), nb::arg("begin"), nb::arg("of"))
        .def(
            "run", [](const GroupedGemm& self, uintptr_t stream) { self.run(reinterpret_cast<cudaStream_t>(stream)); },
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def("grouped_gemm_workspace", surogate::groups_bytes, nb::arg("experts"));
    surogate::bind_launcher(m, "grouped_mma", surogate::grouped_mma);
    surogate::bind_launcher(m, "grouped_narrow", surogate::grouped_narrow);
    surogate::bind_launcher(m, "grouped_thin", surogate::grouped_thin);
}
