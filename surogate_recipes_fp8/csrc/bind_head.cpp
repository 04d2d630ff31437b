#include <nanobind/stl/string.h>
#include <surogate/bind.h>
#include <surogate/dtype.h>

#include <new>

#include "head.h"

namespace nb = nanobind;
using namespace surogate;

namespace {

// dtype_dw = -1 means that there is no dw.
HeadShape shape_of(int64_t tokens, int64_t d_model, int64_t vocab_size, int64_t chunks, bool has_dx, int dtype_dw,
                   bool accumulate_dw, int64_t library_bytes, bool timed, bool fast, bool fast_dx) {
    return {tokens,        d_model,       vocab_size, chunks, BF16, has_dx, dtype_dw >= 0, dtype_dw,
            accumulate_dw, library_bytes, timed,      true,   fast, fast_dx};
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

cudaStream_t stream_of(uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }

}  // namespace

void bind_head(nb::module_& m) {
    auto head = nb::class_<Fp8LmHead>(m, "Fp8LmHead")
        .def(
            "__init__",
            [](Fp8LmHead* self, uintptr_t x, uintptr_t w, uintptr_t targets, uintptr_t loss_scale, uintptr_t w_scale,
               uintptr_t w_t, uintptr_t loss, uintptr_t dx, uintptr_t dw, uintptr_t workspace, int64_t tokens,
               int64_t d_model, int64_t vocab_size, int64_t chunks, float softcap, bool has_dx, int dtype_dw,
               bool accumulate_loss, bool accumulate_dw, bool fast, bool fast_dx, int64_t library_bytes, bool timed,
               uintptr_t stream) {
                new (self) Fp8LmHead(
                    {shape_of(tokens, d_model, vocab_size, chunks, has_dx, dtype_dw, accumulate_dw, library_bytes,
                              timed, fast, fast_dx),
                     softcap, accumulate_loss},
                    {{pointer(x), pointer(w), pointer(targets), pointer(dx), pointer(dw), pointer(workspace),
                      pointer(w_t), pointer(w_scale)},
                     pointer(loss_scale), pointer(loss)},
                    stream_of(stream));
            },
            nb::arg("x"), nb::arg("w"), nb::arg("targets"), nb::arg("loss_scale"), nb::arg("w_scale"), nb::arg("w_t"),
            nb::arg("loss"), nb::arg("dx"), nb::arg("dw"), nb::arg("workspace"), nb::arg("tokens"), nb::arg("d_model"),
            nb::arg("vocab_size"), nb::arg("chunks"), nb::arg("softcap"), nb::arg("has_dx"), nb::arg("dtype_dw"),
            nb::arg("accumulate_loss"), nb::arg("accumulate_dw"), nb::arg("fast"), nb::arg("fast_dx"),
            nb::arg("library_bytes"), nb::arg("timed"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>(),
            "Bind to these buffers and select the algorithms of the products. If `timed`, they are timed on the "
            "buffers, which overwrites w, w_t, w_scale, dw and the workspace; otherwise cuBLASLt's heuristic selects. "
            "w_t 0: the GPU multiplies any layout. dtype_dw -1: no dw.")
        .def("describe", &Fp8LmHead::describe);
    bind_chunks(head);
    m.def(
        "lm_head_workspace_bytes",
        [](int64_t tokens, int64_t d_model, int64_t vocab_size, int64_t chunks, bool has_dx, int dtype_dw,
           int64_t library_bytes) {
            return Fp8LmHead::workspace_bytes(shape_of(tokens, d_model, vocab_size, chunks, has_dx, dtype_dw, false,
                                                       library_bytes, false, false, false));
        },
        nb::arg("tokens"), nb::arg("d_model"), nb::arg("vocab_size"), nb::arg("chunks"), nb::arg("has_dx"),
        nb::arg("dtype_dw"), nb::arg("library_bytes"));
    bind_launcher(m, "head_loss", head_loss);
    bind_launcher(m, "head_loss_codes", head_loss_codes);
    bind_launcher(m, "head_gradient_scale", head_gradient_scale);
}
