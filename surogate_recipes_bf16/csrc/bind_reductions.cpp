// Python bindings of the launchers in reductions.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "reductions.h"

namespace nb = nanobind;

void bind_reductions(nb::module_& m) {
    m.def(
        "accumulate_rounded",
        [](uintptr_t addend, uintptr_t total, uintptr_t sum, uintptr_t micro_step, uintptr_t seed, int64_t stream_id,
           int64_t size, int addend_dtype, uintptr_t stream) {
            surogate::accumulate_rounded(reinterpret_cast<const void*>(addend), reinterpret_cast<const void*>(total),
                                         reinterpret_cast<void*>(sum), reinterpret_cast<const void*>(micro_step),
                                         reinterpret_cast<const void*>(seed), stream_id, size, addend_dtype,
                                         reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("addend"), nb::arg("total"), nb::arg("sum"), nb::arg("micro_step"), nb::arg("seed"), nb::arg("stream_id"),
        nb::arg("size"), nb::arg("addend_dtype"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "global_norm",
        [](uintptr_t table, uintptr_t norm, uintptr_t clip_coef, uintptr_t partials, int64_t tensors, int64_t chunks,
           int64_t chunk_size, double max_norm, uintptr_t stream) {
            surogate::global_norm(reinterpret_cast<const void*>(table), reinterpret_cast<void*>(norm),
                                  reinterpret_cast<void*>(clip_coef), reinterpret_cast<void*>(partials), tensors,
                                  chunks, chunk_size, max_norm, reinterpret_cast<cudaStream_t>(stream));
        },
        nb::arg("table"), nb::arg("norm"), nb::arg("clip_coef"), nb::arg("partials"), nb::arg("tensors"),
        nb::arg("chunks"), nb::arg("chunk_size"), nb::arg("max_norm"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
}
