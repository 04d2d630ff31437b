// Python bindings of loss.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <new>

#include "loss.h"

namespace nb = nanobind;

namespace {

// dtype_dw = -1 means that there is no dw.
surogate::LmHeadShape shape_of(int64_t tokens, int64_t d_model, int64_t vocab_size, int64_t chunks, int dtype,
                               bool has_dx, int dtype_dw, bool accumulate_loss, bool accumulate_dw,
                               int64_t library_bytes) {
    surogate::LmHeadShape shape{};
    shape.tokens = tokens;
    shape.d_model = d_model;
    shape.vocab_size = vocab_size;
    shape.chunks = chunks;
    shape.dtype = dtype;
    shape.has_dx = has_dx;
    shape.has_dw = dtype_dw >= 0;
    shape.dtype_dw = dtype_dw;
    shape.accumulate_loss = accumulate_loss;
    shape.accumulate_dw = accumulate_dw;
    shape.library_bytes = library_bytes;
    return shape;
}

template <class T = void>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

surogate::LmHeadBuffers buffers_of(uintptr_t x, uintptr_t w, uintptr_t targets, uintptr_t loss_scale, uintptr_t loss,
                                   uintptr_t dx, uintptr_t dw, uintptr_t workspace) {
    return {pointer<const void>(x), pointer(w), pointer<const void>(targets),
            pointer<const void>(loss_scale), pointer(loss), pointer(dx), pointer(dw), pointer(workspace)};
}

}  // namespace

void bind_loss(nb::module_& m) {
    using surogate::LmHead;
    nb::class_<LmHead>(m, "LmHead")
        .def(
            "__init__",
            [](LmHead* self, uintptr_t x, uintptr_t w, uintptr_t targets, uintptr_t loss_scale, uintptr_t loss,
               uintptr_t dx, uintptr_t dw, uintptr_t workspace, int64_t tokens, int64_t d_model, int64_t vocab_size,
               int64_t chunks, int dtype, bool has_dx, int dtype_dw, bool accumulate_loss, bool accumulate_dw,
               int64_t library_bytes, bool timed, uintptr_t stream) {
                surogate::LmHeadShape shape = shape_of(tokens, d_model, vocab_size, chunks, dtype, has_dx, dtype_dw,
                                                       accumulate_loss, accumulate_dw, library_bytes);
                shape.timed = timed;
                new (self) LmHead(shape, buffers_of(x, w, targets, loss_scale, loss, dx, dw, workspace),
                                  reinterpret_cast<cudaStream_t>(stream));
            },
            nb::arg("x"), nb::arg("w"), nb::arg("targets"), nb::arg("loss_scale"), nb::arg("loss"), nb::arg("dx"),
            nb::arg("dw"), nb::arg("workspace"), nb::arg("tokens"), nb::arg("d_model"), nb::arg("vocab_size"),
            nb::arg("chunks"), nb::arg("dtype"), nb::arg("has_dx"), nb::arg("dtype_dw"), nb::arg("accumulate_loss"),
            nb::arg("accumulate_dw"), nb::arg("library_bytes"), nb::arg("timed"),
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>(),
            "Bind to these buffers and select the algorithms of the products. If `timed`, they are timed on the "
            "buffers, which overwrites w, dw and the workspace; otherwise cuBLASLt's heuristic selects. "
            "dtype_dw -1: no dw.")
        .def(
            "begin", [](LmHead& self, uintptr_t stream) { self.begin(reinterpret_cast<cudaStream_t>(stream)); },
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "chunk",
            [](LmHead& self, int64_t index, uintptr_t stream) {
                self.chunk(index, reinterpret_cast<cudaStream_t>(stream));
            },
            nb::arg("index"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "end", [](LmHead& self, uintptr_t stream) { self.end(reinterpret_cast<cudaStream_t>(stream)); },
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>())
        .def("describe", &LmHead::describe);
    m.def(
        "lm_head_workspace_bytes",
        [](int64_t tokens, int64_t d_model, int64_t vocab_size, int64_t chunks, int dtype, bool has_dx, int dtype_dw,
           int64_t library_bytes) {
            return LmHead::workspace_bytes(
                shape_of(tokens, d_model, vocab_size, chunks, dtype, has_dx, dtype_dw, false, false, library_bytes));
        },
        nb::arg("tokens"), nb::arg("d_model"), nb::arg("vocab_size"), nb::arg("chunks"), nb::arg("dtype"),
        nb::arg("has_dx"), nb::arg("dtype_dw"), nb::arg("library_bytes"));
    m.def(
        "cross_entropy",
        [](uintptr_t logits, uintptr_t targets, uintptr_t row_loss, int64_t rows, int64_t vocab_size, int64_t ld,
           int dtype, uintptr_t stream) {
            surogate::cross_entropy(pointer(logits), pointer(targets), pointer(row_loss), rows, vocab_size, ld, dtype,
                                    reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("logits"), nb::arg("targets"), nb::arg("row_loss"), nb::arg("rows"), nb::arg("vocab_size"),
        nb::arg("ld"), nb::arg("dtype"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "cross_entropy_grads",
        [](uintptr_t logits, uintptr_t targets, uintptr_t loss_scale, uintptr_t row_loss, int64_t rows,
           int64_t vocab_size, int64_t ld, int dtype, uintptr_t stream) {
            surogate::cross_entropy_grads(pointer(logits), pointer(targets), pointer(loss_scale), pointer(row_loss),
                                          rows, vocab_size, ld, dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("logits"), nb::arg("targets"), nb::arg("loss_scale"), nb::arg("row_loss"), nb::arg("rows"),
        nb::arg("vocab_size"), nb::arg("ld"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "sum_loss",
        [](uintptr_t row_loss, uintptr_t loss_scale, uintptr_t loss, int64_t rows, bool accumulate, uintptr_t stream) {
            surogate::sum_loss(pointer(row_loss), pointer(loss_scale), pointer(loss), rows, accumulate,
                               reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("row_loss"), nb::arg("loss_scale"), nb::arg("loss"), nb::arg("rows"), nb::arg("accumulate"),
        nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "labelled_rows",
        [](uintptr_t targets, uintptr_t rows, uintptr_t labels, int64_t tokens, uintptr_t stream) {
            surogate::labelled_rows(pointer(targets), pointer(rows), pointer(labels), tokens,
                                    reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("targets"), nb::arg("rows"), nb::arg("labels"), nb::arg("tokens"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "gather_rows",
        [](uintptr_t x, uintptr_t rows, uintptr_t out, int64_t count, int64_t row_bytes, uintptr_t stream) {
            surogate::gather_rows(pointer(x), pointer(rows), pointer(out), count, row_bytes,
                                  reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("x"), nb::arg("rows"), nb::arg("out"), nb::arg("count"), nb::arg("row_bytes"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "scatter_rows",
        [](uintptr_t in, uintptr_t rows, uintptr_t x, int64_t count, int64_t row_bytes, uintptr_t stream) {
            surogate::scatter_rows(pointer(in), pointer(rows), pointer(x), count, row_bytes,
                                   reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("in"), nb::arg("rows"), nb::arg("x"), nb::arg("count"), nb::arg("row_bytes"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
