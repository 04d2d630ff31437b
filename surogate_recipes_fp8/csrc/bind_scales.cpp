// Python bindings of the launchers in scales.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "scales.h"

namespace nb = nanobind;
using namespace surogate;

void bind_scales(nb::module_& m) {
    m.def(
        "fp8_scales",
        [](Address table, int64_t quantisers, float maximum, Address stream) {
            fp8_scales(pointer(table), quantisers, maximum, stream_of(stream));
        },
        nb::arg("table"), nb::arg("quantisers"), nb::arg("maximum"), nb::arg("stream"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fp8_update",
        [](Address table, Address clip_coef, Address history, int64_t length, int64_t quantisers, Address stream) {
            fp8_update(pointer(table), pointer(clip_coef), pointer(history), length, quantisers, stream_of(stream));
        },
        nb::arg("table"), nb::arg("clip_coef"), nb::arg("history"), nb::arg("length"), nb::arg("quantisers"),
        nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fp8_guard",
        [](Address table, Address norm, Address clip_coef, Address guarded, int64_t quantisers, Address stream) {
            fp8_guard(pointer(table), pointer(norm), pointer(clip_coef), pointer(guarded), quantisers,
                      stream_of(stream));
        },
        nb::arg("table"), nb::arg("norm"), nb::arg("clip_coef"), nb::arg("guarded"), nb::arg("quantisers"),
        nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
}
