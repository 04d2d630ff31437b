// Python bindings of gemm.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <new>

#include "elementwise.h"
#include "gemm.h"

namespace nb = nanobind;

namespace {

surogate::GemmShape shape_of(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, int dtype_ab, int dtype_d,
                             int dtype_bias, bool accumulate, int64_t library_bytes) {
    surogate::GemmShape shape{};
    shape.m = m;
    shape.n = n;
    shape.k = k;
    shape.trans_a = trans_a;
    shape.trans_b = trans_b;
    shape.dtype_ab = dtype_ab;
    shape.dtype_d = dtype_d;
    shape.has_bias = dtype_bias >= 0;
    shape.dtype_bias = dtype_bias;
    shape.accumulate = accumulate;
    shape.library_bytes = library_bytes;
    shape.alignment_a = shape.alignment_b = shape.alignment_d = 256;
    return shape;
}

template <class T = void>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_gemm(nb::module_& m) {
    using surogate::Gemm;
    nb::class_<Gemm>(m, "Gemm")
        .def(
            "__init__",
            [](Gemm* self, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t bias, uintptr_t workspace,
               int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, int dtype_ab, int dtype_d, int dtype_bias,
               bool accumulate, int64_t library_bytes, uintptr_t stream) {
                surogate::GemmBuffers buffers;
                buffers.a = pointer(a);
                buffers.b = pointer(b);
                buffers.c = pointer(c);
                buffers.d = pointer(d);
                buffers.bias = pointer(bias);
                buffers.workspace = pointer(workspace);
                const surogate::GemmShape shape =
                    shape_of(m, n, k, trans_a, trans_b, dtype_ab, dtype_d, dtype_bias, accumulate, library_bytes);
                new (self) Gemm(shape, buffers, reinterpret_cast<cudaStream_t>(stream));
            },
            nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"), nb::arg("bias"), nb::arg("workspace"), nb::arg("m"),
            nb::arg("n"), nb::arg("k"), nb::arg("trans_a"), nb::arg("trans_b"), nb::arg("dtype_ab"), nb::arg("dtype_d"),
            nb::arg("dtype_bias"), nb::arg("accumulate"), nb::arg("library_bytes"),
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>(),
            "Choose an algorithm, timed on these buffers; a, b, c, d and the workspace are overwritten. "
            "dtype_bias -1: no bias. c 0: d, if it accumulates.")
        .def(
            "run",
            [](Gemm& self, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t bias, uintptr_t workspace,
               uintptr_t stream) {
                self.run(pointer(a), pointer(b), pointer(d), pointer(bias), pointer(workspace),
                         reinterpret_cast<cudaStream_t>(stream), pointer(c));
            },
            nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"), nb::arg("bias"), nb::arg("workspace"), nb::arg("stream"),
            nb::call_guard<nb::gil_scoped_release>())
        .def("describe", &Gemm::describe);
    m.def(
        "gemm_workspace_bytes",
        [](int64_t m, int64_t n, int64_t k, int dtype_ab, int dtype_d, int dtype_bias, int64_t library_bytes) {
            return Gemm::workspace_bytes(
                shape_of(m, n, k, false, false, dtype_ab, dtype_d, dtype_bias, false, library_bytes));
        },
        nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("dtype_ab"), nb::arg("dtype_d"), nb::arg("dtype_bias"),
        nb::arg("library_bytes"));
    m.def("gemm_export", &surogate::exported_choices, nb::call_guard<nb::gil_scoped_release>(),
          "Return the algorithms selected in this process: (description, algorithm).");
    m.def("gemm_import", &surogate::import_choices, nb::arg("choices"), nb::call_guard<nb::gil_scoped_release>(),
          "Set algorithms to use instead of timing.");
    m.def(
        "random_normal",
        [](uintptr_t out, int64_t size, int dtype, uintptr_t stream) {
            surogate::random_normal(pointer(out), size, dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("out"), nb::arg("size"), nb::arg("dtype"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
}
