// Python binding of pair_gemm.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <new>

#include "pair_gemm.h"

namespace nb = nanobind;

void bind_pair(nb::module_& m) {
    using surogate::PairGemm;
    nb::class_<PairGemm>(m, "PairGemm")
        .def(
            "__init__",
            [](PairGemm* self, uintptr_t a, uintptr_t b, uintptr_t a2, uintptr_t b2, uintptr_t d, int64_t rows,
               int64_t columns, int64_t k, int64_t k2, bool transposed) {
                const surogate::PairBuffers buffers{
                    reinterpret_cast<const void*>(a), reinterpret_cast<const void*>(b),
                    reinterpret_cast<const void*>(a2), reinterpret_cast<const void*>(b2), reinterpret_cast<void*>(d)};
                new (self) PairGemm({rows, columns, k, k2, transposed}, buffers);
            },
            nb::arg("a"), nb::arg("b"), nb::arg("a2"), nb::arg("b2"), nb::arg("d"), nb::arg("m"), nb::arg("n"),
            nb::arg("k"), nb::arg("k2"), nb::arg("transposed"))
        .def(
            "run", [](const PairGemm& self, uintptr_t stream) { self.run(reinterpret_cast<cudaStream_t>(stream)); },
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
}
