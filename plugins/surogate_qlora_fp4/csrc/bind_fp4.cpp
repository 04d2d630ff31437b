// Python bindings of the launchers in fp4.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "fp4.h"

namespace nb = nanobind;
using namespace surogate;

namespace {

using Address = uintptr_t;
using Rows = std::vector<int64_t>;

void* at(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

void bind_fp4(nb::module_& m) {
    const auto guard = nb::call_guard<nb::gil_scoped_release>();
    m.def(
        "fp4_block_quantize",
        [](Address w, Address codes, Address scales, Address global_scales, Address amax, const Rows& rows,
           int64_t columns, bool four_over_six, int dtype, Address stream) {
            fp4_block_quantize(at(w), {at(codes), at(scales), at(global_scales)}, at(amax), {rows, columns},
                               four_over_six, dtype, static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("w"), nb::arg("codes"), nb::arg("scales"), nb::arg("global_scales"), nb::arg("amax"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("four_over_six"), nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "fp4_block_dequantize",
        [](Address codes, Address scales, Address global_scales, Address out, const Rows& rows, int64_t columns,
           int dtype, Address stream) {
            fp4_block_dequantize({at(codes), at(scales), at(global_scales)}, at(out), {rows, columns}, dtype,
                                 static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("scales"), nb::arg("global_scales"), nb::arg("out"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "fp4_block_amax",
        [](Address codes, Address scales, Address global_scales, Address amax, const Rows& rows, int64_t columns,
           int dtype, Address stream) {
            fp4_block_amax({at(codes), at(scales), at(global_scales)}, at(amax), {rows, columns}, dtype,
                           static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("scales"), nb::arg("global_scales"), nb::arg("amax"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "fp4_block_to_e4m3",
        [](Address codes, Address scales, Address global_scales, Address amax, Address copy, Address scale,
           bool transposed, const Rows& rows, int64_t columns, int dtype, Address stream) {
            fp4_block_to_e4m3({at(codes), at(scales), at(global_scales)}, at(amax), at(copy), at(scale), transposed,
                              {rows, columns}, dtype, static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("scales"), nb::arg("global_scales"), nb::arg("amax"), nb::arg("copy"),
        nb::arg("scale"), nb::arg("transposed"), nb::arg("rows"), nb::arg("columns"), nb::arg("dtype"),
        nb::arg("stream"), guard);
}
