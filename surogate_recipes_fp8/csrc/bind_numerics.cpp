// Python bindings of the launchers in numerics.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "numerics.h"

namespace nb = nanobind;
using namespace surogate;

void bind_numerics(nb::module_& m) {
    m.def(
        "fp8_count",
        [](Address x, Address scale, Address amax, Address counts, int64_t elements, float clipped, float lost,
           Address stream) {
            fp8_count(pointer(x), pointer(scale), pointer(amax), pointer(counts), elements, clipped, lost,
                      stream_of(stream));
        },
        nb::arg("x"), nb::arg("scale"), nb::arg("amax"), nb::arg("counts"), nb::arg("elements"), nb::arg("clipped"),
        nb::arg("lost"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "fp8_report",
        [](Address table, Address history, Address out, int64_t tensors, int64_t length, int64_t quantisers,
           Address stream) {
            fp8_report(pointer(table), pointer(history), pointer(out), tensors, length, quantisers, stream_of(stream));
        },
        nb::arg("table"), nb::arg("history"), nb::arg("out"), nb::arg("tensors"), nb::arg("length"),
        nb::arg("quantisers"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>());
}
