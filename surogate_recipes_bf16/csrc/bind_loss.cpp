#include <nanobind/stl/string.h>
#include <surogate/bind.h>

#include <new>

#include "lm_head_distill.h"
#include "lm_head_tokens.h"
#include "loss.h"

namespace nb = nanobind;
using namespace surogate;

namespace {

// dtype_dw = -1 means that there is no dw.
HeadShape shape_of(int64_t tokens, int64_t d_model, int64_t vocab_size, int64_t chunks, int dtype, bool has_dx,
                   int dtype_dw, bool accumulate_dw, int64_t library_bytes, bool timed) {
    return {tokens, d_model, vocab_size, chunks, dtype, has_dx, dtype_dw >= 0, dtype_dw, accumulate_dw, library_bytes, timed};
}

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

cudaStream_t stream_of(uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }

// The launches of a bound head and the size of its workspace.
template <class Head>
void bind_launches(nb::class_<Head>& bound, nb::module_& m, const char* workspace_bytes) {
    bind_chunks(bound);
    m.def(
        workspace_bytes,
        [](int64_t tokens, int64_t d_model, int64_t vocab_size, int64_t chunks, int dtype, bool has_dx, int dtype_dw,
           int64_t library_bytes) {
            return Head::workspace_bytes(
                shape_of(tokens, d_model, vocab_size, chunks, dtype, has_dx, dtype_dw, false, library_bytes, false));
        },
        nb::arg("tokens"), nb::arg("d_model"), nb::arg("vocab_size"), nb::arg("chunks"), nb::arg("dtype"),
        nb::arg("has_dx"), nb::arg("dtype_dw"), nb::arg("library_bytes"));
}

}  // namespace

void bind_loss(nb::module_& m) {
    auto head = nb::class_<LmHead>(m, "LmHead")
        .def(
            "__init__",
            [](LmHead* self, uintptr_t x, uintptr_t w, uintptr_t targets, uintptr_t loss_scale, uintptr_t loss,
               uintptr_t dx, uintptr_t dw, uintptr_t workspace, int64_t tokens, int64_t d_model, int64_t vocab_size,
               int64_t chunks, float softcap, int dtype, bool has_dx, int dtype_dw, bool accumulate_loss,
               bool accumulate_dw, int64_t library_bytes, bool timed, uintptr_t stream) {
                new (self) LmHead({shape_of(tokens, d_model, vocab_size, chunks, dtype, has_dx, dtype_dw, accumulate_dw,
                                            library_bytes, timed),
                                   softcap, accumulate_loss},
                                  {{pointer(x), pointer(w), pointer(targets), pointer(dx), pointer(dw),
                                    pointer(workspace)},
                                   pointer(loss_scale), pointer(loss)},
                                  stream_of(stream));
            },
            nb::arg("x"), nb::arg("w"), nb::arg("targets"), nb::arg("loss_scale"), nb::arg("loss"), nb::arg("dx"),
            nb::arg("dw"), nb::arg("workspace"), nb::arg("tokens"), nb::arg("d_model"), nb::arg("vocab_size"),
            nb::arg("chunks"), nb::arg("softcap"), nb::arg("dtype"), nb::arg("has_dx"), nb::arg("dtype_dw"),
            nb::arg("accumulate_loss"), nb::arg("accumulate_dw"), nb::arg("library_bytes"), nb::arg("timed"),
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>(),
            "Bind to these buffers and select the algorithms of the products. If `timed`, they are timed on the "
            "buffers, which overwrites w, dw and the workspace; otherwise cuBLASLt's heuristic selects. "
            "dtype_dw -1: no dw.")
        .def("describe", &LmHead::describe);
    bind_launches(head, m, "lm_head_workspace_bytes");
    auto tokens_head = nb::class_<LmHeadTokens>(m, "LmHeadTokens")
        .def(
            "__init__",
            [](LmHeadTokens* self, uintptr_t x, uintptr_t w, uintptr_t targets, uintptr_t log_probs,
               uintptr_t logsumexp, uintptr_t mean, uintptr_t d_logsumexp, uintptr_t dx, uintptr_t dw,
               uintptr_t workspace, int64_t tokens, int64_t d_model, int64_t vocab_size, int64_t chunks, float softcap,
               int dtype, bool has_dx, int dtype_dw, bool accumulate_dw, int64_t library_bytes, bool timed,
               uintptr_t stream) {
                new (self) LmHeadTokens(shape_of(tokens, d_model, vocab_size, chunks, dtype, has_dx, dtype_dw,
                                                 accumulate_dw, library_bytes, timed),
                                        softcap,
                                        {{pointer(x), pointer(w), pointer(targets), pointer(dx), pointer(dw),
                                          pointer(workspace)},
                                         pointer(log_probs), pointer(logsumexp), pointer(mean), pointer(d_logsumexp)},
                                        stream_of(stream));
            },
            nb::arg("x"), nb::arg("w"), nb::arg("targets"), nb::arg("log_probs"), nb::arg("logsumexp"), nb::arg("mean"),
            nb::arg("d_logsumexp"), nb::arg("dx"), nb::arg("dw"), nb::arg("workspace"), nb::arg("tokens"),
            nb::arg("d_model"), nb::arg("vocab_size"), nb::arg("chunks"), nb::arg("softcap"), nb::arg("dtype"),
            nb::arg("has_dx"), nb::arg("dtype_dw"), nb::arg("accumulate_dw"), nb::arg("library_bytes"), nb::arg("timed"),
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>(), "As LmHead. dtype_dw -1: no dw.");
    bind_launches(tokens_head, m, "lm_head_tokens_workspace_bytes");
    auto distill_head = nb::class_<LmHeadDistill>(m, "LmHeadDistill")
        .def(
            "__init__",
            [](LmHeadDistill* self, uintptr_t x, uintptr_t w, uintptr_t targets, uintptr_t ids, uintptr_t log_probs,
               uintptr_t loss_scale, uintptr_t loss, uintptr_t cross_entropy, uintptr_t divergence, uintptr_t dx,
               uintptr_t dw, uintptr_t workspace, int64_t tokens, int64_t d_model, int64_t vocab_size, int64_t chunks,
               int64_t k, float weight, float temperature, float softcap, bool reverse, int dtype, bool has_dx,
               int dtype_dw, bool accumulate, bool accumulate_dw, int64_t library_bytes, bool timed,
               uintptr_t stream) {
                new (self) LmHeadDistill({shape_of(tokens, d_model, vocab_size, chunks, dtype, has_dx, dtype_dw,
                                                   accumulate_dw, library_bytes, timed),
                                          k, weight, temperature, softcap, reverse, accumulate},
                                         {{pointer(x), pointer(w), pointer(targets), pointer(dx), pointer(dw),
                                           pointer(workspace)},
                                          pointer(ids), pointer(log_probs), pointer(loss_scale), pointer(loss),
                                          pointer(cross_entropy), pointer(divergence)},
                                         stream_of(stream));
            },
            nb::arg("x"), nb::arg("w"), nb::arg("targets"), nb::arg("ids"), nb::arg("log_probs"),
            nb::arg("loss_scale"), nb::arg("loss"), nb::arg("cross_entropy"), nb::arg("divergence"), nb::arg("dx"),
            nb::arg("dw"), nb::arg("workspace"), nb::arg("tokens"), nb::arg("d_model"), nb::arg("vocab_size"),
            nb::arg("chunks"), nb::arg("k"), nb::arg("weight"), nb::arg("temperature"), nb::arg("softcap"),
            nb::arg("reverse"), nb::arg("dtype"), nb::arg("has_dx"), nb::arg("dtype_dw"), nb::arg("accumulate"),
            nb::arg("accumulate_dw"), nb::arg("library_bytes"), nb::arg("timed"), nb::arg("stream"),
            nb::call_guard<nb::gil_scoped_release>(), "As LmHead. dtype_dw -1: no dw.");
    bind_launches(distill_head, m, "lm_head_distill_workspace_bytes");
    bind_launcher(m, "distill", distill);
    bind_launcher(m, "token_statistics", token_statistics);
    bind_launcher(m, "token_logit_grads", token_logit_grads);
    bind_launcher(m, "cross_entropy", cross_entropy);
    bind_launcher(m, "cross_entropy_grads", cross_entropy_grads);
    bind_launcher(m, "sum_loss", sum_loss);
    bind_launcher(m, "labelled_rows", labelled_rows);
    bind_launcher(m, "gather_rows", gather_rows);
    bind_launcher(m, "scatter_rows", scatter_rows);
}
