#include <surogate/bind.h>

#include <new>

#include "attention.h"

namespace nb = nanobind;
using namespace surogate;

namespace {

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

cudaStream_t stream_of(uintptr_t address) { return reinterpret_cast<cudaStream_t>(address); }

}  // namespace

void bind_attention(nb::module_& m) {
    bind_launcher(m, "attention_plain", attention_plain);
    bind_launcher(m, "attention_plain_bwd", attention_plain_bwd);
    bind_launcher(m, "attention_mma", attention_mma);
    bind_launcher(m, "attention_mma_bwd", attention_mma_bwd);

    m.def("cudnn_version", &cudnn_version, nb::call_guard<nb::gil_scoped_release>(),
          "Return the version of the loaded cuDNN: major * 10000 + minor * 100 + patch.");
    nb::class_<CudnnAttention>(m, "CudnnAttention")
        .def(
            "__init__",
            [](CudnnAttention* self, int64_t tokens, int64_t documents, int64_t seq_len, int64_t heads,
               int64_t kv_heads, int64_t head_dim, int64_t window, double scale) {
                new (self)
                    CudnnAttention(AttentionShape{tokens, documents, seq_len, heads, kv_heads, head_dim, window, scale});
            },
            nb::arg("tokens"), nb::arg("documents"), nb::arg("seq_len"), nb::arg("heads"), nb::arg("kv_heads"),
            nb::arg("head_dim"), nb::arg("window"), nb::arg("scale"), nb::call_guard<nb::gil_scoped_release>())
        .def("workspace_bytes", &CudnnAttention::workspace_bytes)
        .def(
            "run",
            [](const CudnnAttention& self, uintptr_t qkv, uintptr_t cu_seqlens, uintptr_t out, uintptr_t lse,
               uintptr_t workspace, uintptr_t stream) {
                self.run(pointer(qkv), pointer(cu_seqlens), pointer(out), pointer(lse), pointer(workspace),
                         stream_of(stream));
            },
            nb::arg("qkv"), nb::arg("cu_seqlens"), nb::arg("out"), nb::arg("lse"), nb::arg("workspace"),
            nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    nb::class_<CudnnAttentionBackward>(m, "CudnnAttentionBackward")
        .def(
            "__init__",
            [](CudnnAttentionBackward* self, int64_t tokens, int64_t documents, int64_t seq_len, int64_t heads,
               int64_t kv_heads, int64_t head_dim, int64_t window, double scale, int64_t route, int64_t groups,
               bool packed_dkv, bool packed_dq, int64_t chunks) {
                new (self) CudnnAttentionBackward({tokens, documents, seq_len, heads, kv_heads, head_dim, window, scale},
                                                  static_cast<BackwardRoute>(route), groups, packed_dkv, packed_dq,
                                                  chunks);
            },
            nb::arg("tokens"), nb::arg("documents"), nb::arg("seq_len"), nb::arg("heads"), nb::arg("kv_heads"),
            nb::arg("head_dim"), nb::arg("window"), nb::arg("scale"), nb::arg("route"), nb::arg("groups"), nb::arg("packed_dkv"), nb::arg("packed_dq"),
            nb::arg("chunks"),
            nb::call_guard<nb::gil_scoped_release>())
        .def("workspace_bytes", &CudnnAttentionBackward::workspace_bytes)
        .def(
            "run",
            [](const CudnnAttentionBackward& self, uintptr_t dout, uintptr_t qkv, uintptr_t out, uintptr_t lse,
               uintptr_t cu_seqlens, uintptr_t dqkv, uintptr_t workspace, uintptr_t stream) {
                self.run(pointer(dout), pointer(qkv), pointer(out), pointer(lse), pointer(cu_seqlens), pointer(dqkv),
                         pointer(workspace), stream_of(stream));
            },
            nb::arg("dout"), nb::arg("qkv"), nb::arg("out"), nb::arg("lse"), nb::arg("cu_seqlens"), nb::arg("dqkv"),
            nb::arg("workspace"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
}
