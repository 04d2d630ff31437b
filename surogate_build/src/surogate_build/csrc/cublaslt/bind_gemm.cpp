// Python bindings of <surogate/gemm.h>. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <new>

#include "surogate/check.h"
#include "surogate/gemm.h"
#include "surogate/workspace.h"

namespace nb = nanobind;

namespace {

template <class T = void>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

surogate::GemmScaling scaling_of(bool scaled, int64_t block) {
    using surogate::GemmScaling;
    SUROGATE_REQUIRE(block == 0 || block == 16 || block == 32, "gemm",
                     "scale_block must be 0, 16 or 32, got " + std::to_string(block));
    if (block > 0) {
        return block == 16 ? GemmScaling::Blocks16 : GemmScaling::Blocks32;
    }
    return scaled ? GemmScaling::Tensor : GemmScaling::None;
}

surogate::GemmBuffers buffers_of(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t bias, uintptr_t scale_a,
                                 uintptr_t scale_b, uintptr_t workspace) {
    surogate::GemmBuffers buffers;
    buffers.a = pointer(a);
    buffers.b = pointer(b);
    buffers.c = pointer(c);
    buffers.d = pointer(d);
    buffers.bias = pointer(bias);
    buffers.scale_a = pointer(scale_a);
    buffers.scale_b = pointer(scale_b);
    buffers.workspace = pointer(workspace);
    return buffers;
}

}  // namespace

void bind_gemm(nb::module_& m) {
    using surogate::Gemm;
    nb::class_<Gemm>(m, "Gemm")
        .def(
            "__init__",
            [](Gemm* self, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t bias, uintptr_t scale_a,
               uintptr_t scale_b, uintptr_t workspace, int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b,
               int dtype_a, int dtype_b, int dtype_d, int dtype_bias, bool accumulate, bool fast, int64_t lda, int64_t ldb,
               int64_t ldd, int64_t batch, int64_t stride_a, int64_t stride_b, int64_t stride_d, int64_t library_bytes,
               int64_t scale_block, uintptr_t factors, uintptr_t stream) {
                surogate::GemmShape shape{};
                shape.m = m;
                shape.n = n;
                shape.k = k;
                shape.trans_a = trans_a;
                shape.trans_b = trans_b;
                shape.dtype_a = dtype_a;
                shape.dtype_b = dtype_b;
                shape.dtype_d = dtype_d;
                shape.has_bias = dtype_bias >= 0;
                shape.dtype_bias = dtype_bias;
                shape.accumulate = accumulate;
                shape.scaling = scaling_of(scale_a != 0, scale_block);
                shape.fast = fast;
                shape.device_factors = factors != 0;
                shape.lda = lda;
                shape.ldb = ldb;
                shape.ldd = ldd;
                shape.batch = batch;
                shape.stride_a = stride_a;
                shape.stride_b = stride_b;
                shape.stride_d = stride_d;
                shape.library_bytes = library_bytes;
                shape.alignment_a = shape.alignment_b = shape.alignment_d = surogate::workspace_alignment;
                surogate::GemmBuffers buffers = buffers_of(a, b, c, d, bias, scale_a, scale_b, workspace);
                buffers.factors = pointer<float>(factors);
                new (self) Gemm(shape, buffers, reinterpret_cast<cudaStream_t>(stream));
            },
            nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"), nb::arg("bias"), nb::arg("scale_a"),
            nb::arg("scale_b"), nb::arg("workspace"), nb::kw_only(), nb::arg("m"), nb::arg("n"), nb::arg("k"),
            nb::arg("trans_a") = false, nb::arg("trans_b") = false, nb::arg("dtype_a"), nb::arg("dtype_b"),
            nb::arg("dtype_d"), nb::arg("dtype_bias") = -1, nb::arg("accumulate") = false, nb::arg("fast") = false,
            nb::arg("lda") = 0, nb::arg("ldb") = 0, nb::arg("ldd") = 0, nb::arg("batch") = 0, nb::arg("stride_a") = 0,
            nb::arg("stride_b") = 0, nb::arg("stride_d") = 0, nb::arg("library_bytes"), nb::arg("scale_block") = 0,
            nb::arg("factors") = 0, nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>(),
            "Select an algorithm, timed on these buffers; a, b, c, d, the scales, the factors and the workspace are "
            "overwritten. Nothing is timed if a, b, c and d are 0. scale_a 0: no scales. scale_block: the elements that "
            "share a scale, 16 or 32; 0: all of a matrix. dtype_bias -1: no bias. c 0: d, if it accumulates. factors: "
            "for run_with_factors.")
        .def(
            "run",
            [](Gemm& self, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t bias, uintptr_t scale_a,
               uintptr_t scale_b, uintptr_t workspace, uintptr_t stream) {
                self.run(buffers_of(a, b, c, d, bias, scale_a, scale_b, workspace),
                         reinterpret_cast<cudaStream_t>(stream));
            },
            nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"), nb::arg("bias"), nb::arg("scale_a"),
            nb::arg("scale_b"), nb::arg("workspace"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "run_scaled",
            [](Gemm& self, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t workspace, float alpha,
               float beta, uintptr_t stream) {
                surogate::GemmBuffers buffers = buffers_of(a, b, c, d, 0, 0, 0, workspace);
                buffers.alpha = alpha;
                buffers.beta = beta;
                self.run(buffers, reinterpret_cast<cudaStream_t>(stream));
            },
            nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"), nb::arg("workspace"), nb::arg("alpha"),
            nb::arg("beta"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>(),
            "Run with factors of the product and of c, without bias and scales.")
        .def(
            "run_with_factors",
            [](Gemm& self, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t bias, uintptr_t scale_a,
               uintptr_t scale_b, uintptr_t factors, uintptr_t workspace, uintptr_t stream) {
                surogate::GemmBuffers buffers = buffers_of(a, b, c, d, bias, scale_a, scale_b, workspace);
                buffers.factors = pointer<float>(factors);
                self.run(buffers, reinterpret_cast<cudaStream_t>(stream));
            },
            nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"), nb::arg("bias"), nb::arg("scale_a"),
            nb::arg("scale_b"), nb::arg("factors"), nb::arg("workspace"), nb::arg("stream"),
            nb::call_guard<nb::gil_scoped_release>(),
            "Run with the factors {alpha, beta} of the product and of c that device memory contains by then.")
        .def("describe", &Gemm::describe);
    m.def("gemm_export", &surogate::exported_choices, nb::call_guard<nb::gil_scoped_release>(),
          "Return the timed and imported algorithms of this module: (description, algorithm).");
    m.def("gemm_count", &surogate::count_choices, nb::call_guard<nb::gil_scoped_release>(),
          "Return the number of algorithms that gemm_export returns.");
    m.def("gemm_import", &surogate::import_choices, nb::arg("choices"), nb::call_guard<nb::gil_scoped_release>(),
          "Set algorithms to use instead of timing.");
    m.def(
        "random_normal",
        [](uintptr_t out, int64_t size, int dtype, uintptr_t stream) {
            surogate::random_normal(pointer(out), size, dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("out"), nb::arg("size"), nb::arg("dtype"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
}
