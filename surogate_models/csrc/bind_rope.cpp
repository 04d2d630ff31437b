// Python bindings of the launchers in qk_norm_rope.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "qk_norm_rope.h"

namespace nb = nanobind;

void bind_rope(nb::module_& m) {
    m.def(
        "qk_norm_rope",
        [](uintptr_t qkv, uintptr_t q_norm, uintptr_t k_norm, uintptr_t positions, uintptr_t inv_freq, uintptr_t out,
           int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, double eps,
           double attention_factor, int dtype, uintptr_t stream) {
            surogate::qk_norm_rope(reinterpret_cast<const void*>(qkv), reinterpret_cast<const void*>(q_norm),
                                   reinterpret_cast<const void*>(k_norm), reinterpret_cast<const void*>(positions),
                                   reinterpret_cast<const void*>(inv_freq), reinterpret_cast<void*>(out), tokens,
                                   n_heads, n_kv_heads, head_dim, eps, attention_factor, dtype,
                                   reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("qkv"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("positions"), nb::arg("inv_freq"),
        nb::arg("out"), nb::arg("tokens"), nb::arg("n_heads"), nb::arg("n_kv_heads"), nb::arg("head_dim"),
        nb::arg("eps"), nb::arg("attention_factor"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "qk_norm_rope_bwd",
        [](uintptr_t dy, uintptr_t qkv, uintptr_t q_norm, uintptr_t k_norm, uintptr_t positions, uintptr_t inv_freq,
           uintptr_t d_qkv, uintptr_t d_q_norm, uintptr_t d_k_norm, uintptr_t partials, int64_t partial_blocks,
           int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, double eps,
           double attention_factor, bool accumulate_q, bool accumulate_k, int dtype, int d_q_norm_dtype,
           int d_k_norm_dtype, uintptr_t stream) {
            surogate::qk_norm_rope_bwd(
                reinterpret_cast<const void*>(dy), reinterpret_cast<const void*>(qkv),
                reinterpret_cast<const void*>(q_norm), reinterpret_cast<const void*>(k_norm),
                reinterpret_cast<const void*>(positions), reinterpret_cast<const void*>(inv_freq),
                reinterpret_cast<void*>(d_qkv), reinterpret_cast<void*>(d_q_norm), reinterpret_cast<void*>(d_k_norm),
                reinterpret_cast<void*>(partials), partial_blocks, tokens, n_heads, n_kv_heads, head_dim, eps,
                attention_factor, accumulate_q, accumulate_k, dtype, d_q_norm_dtype, d_k_norm_dtype,
                reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("dy"), nb::arg("qkv"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("positions"),
        nb::arg("inv_freq"), nb::arg("d_qkv"), nb::arg("d_q_norm"), nb::arg("d_k_norm"), nb::arg("partials"),
        nb::arg("partial_blocks"), nb::arg("tokens"), nb::arg("n_heads"), nb::arg("n_kv_heads"), nb::arg("head_dim"),
        nb::arg("eps"), nb::arg("attention_factor"), nb::arg("accumulate_q"), nb::arg("accumulate_k"),
        nb::arg("dtype"), nb::arg("d_q_norm_dtype"), nb::arg("d_k_norm_dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "qk_norm_rope_dgrad",
        [](uintptr_t dy, uintptr_t qkv, uintptr_t q_norm, uintptr_t k_norm, uintptr_t positions, uintptr_t inv_freq,
           uintptr_t d_qkv, int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, double eps,
           double attention_factor, int dtype, uintptr_t stream) {
            surogate::qk_norm_rope_dgrad(reinterpret_cast<const void*>(dy), reinterpret_cast<const void*>(qkv),
                                         reinterpret_cast<const void*>(q_norm), reinterpret_cast<const void*>(k_norm),
                                         reinterpret_cast<const void*>(positions),
                                         reinterpret_cast<const void*>(inv_freq), reinterpret_cast<void*>(d_qkv),
                                         tokens, n_heads, n_kv_heads, head_dim, eps, attention_factor, dtype,
                                         reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("dy"), nb::arg("qkv"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("positions"),
        nb::arg("inv_freq"), nb::arg("d_qkv"), nb::arg("tokens"), nb::arg("n_heads"), nb::arg("n_kv_heads"),
        nb::arg("head_dim"), nb::arg("eps"), nb::arg("attention_factor"), nb::arg("dtype"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "rope",
        [](uintptr_t qkv, uintptr_t positions, uintptr_t inv_freq, uintptr_t out, int64_t tokens, int64_t n_heads,
           int64_t n_kv_heads, int64_t head_dim, double attention_factor, int dtype, uintptr_t stream) {
            surogate::rope(reinterpret_cast<const void*>(qkv), reinterpret_cast<const void*>(positions),
                           reinterpret_cast<const void*>(inv_freq), reinterpret_cast<void*>(out), tokens, n_heads,
                           n_kv_heads, head_dim, attention_factor, dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("qkv"), nb::arg("positions"), nb::arg("inv_freq"), nb::arg("out"), nb::arg("tokens"),
        nb::arg("n_heads"), nb::arg("n_kv_heads"), nb::arg("head_dim"), nb::arg("attention_factor"), nb::arg("dtype"),
        nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "rope_bwd",
        [](uintptr_t dy, uintptr_t positions, uintptr_t inv_freq, uintptr_t d_qkv, int64_t tokens, int64_t n_heads,
           int64_t n_kv_heads, int64_t head_dim, double attention_factor, int dtype, uintptr_t stream) {
            surogate::rope_bwd(reinterpret_cast<const void*>(dy), reinterpret_cast<const void*>(positions),
                               reinterpret_cast<const void*>(inv_freq), reinterpret_cast<void*>(d_qkv), tokens, n_heads,
                               n_kv_heads, head_dim, attention_factor, dtype, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("dy"), nb::arg("positions"), nb::arg("inv_freq"), nb::arg("d_qkv"), nb::arg("tokens"),
        nb::arg("n_heads"), nb::arg("n_kv_heads"), nb::arg("head_dim"), nb::arg("attention_factor"), nb::arg("dtype"),
        nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
}
