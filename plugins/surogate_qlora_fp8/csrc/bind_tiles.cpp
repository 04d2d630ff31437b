// Python bindings of the launchers in tiles.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "tiles.h"

namespace nb = nanobind;
using namespace surogate;

namespace {

using Address = uintptr_t;
using Rows = std::vector<int64_t>;

void* at(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

void bind_tiles(nb::module_& m) {
    const auto guard = nb::call_guard<nb::gil_scoped_release>();
    m.def(
        "fp8_tile_quantize",
        [](Address w, Address codes, Address scales, const Rows& rows, int64_t columns, int tile, int dtype,
           Address stream) {
            fp8_tile_quantize(at(w), at(codes), at(scales), {rows, columns, tile}, dtype,
                              static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("w"), nb::arg("codes"), nb::arg("scales"), nb::arg("rows"), nb::arg("columns"), nb::arg("tile"),
        nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "fp8_tile_dequantize",
        [](Address codes, Address scales, Address out, const Rows& rows, int64_t columns, int tile, int dtype,
           Address stream) {
            fp8_tile_dequantize(at(codes), at(scales), at(out), {rows, columns, tile}, dtype,
                                static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("scales"), nb::arg("out"), nb::arg("rows"), nb::arg("columns"), nb::arg("tile"),
        nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "fp8_tile_amax",
        [](Address codes, Address scales, Address amax, const Rows& rows, int64_t columns, int tile, int dtype,
           Address stream) {
            fp8_tile_amax(at(codes), at(scales), at(amax), {rows, columns, tile}, dtype,
                          static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("scales"), nb::arg("amax"), nb::arg("rows"), nb::arg("columns"), nb::arg("tile"),
        nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "fp8_tile_to_e4m3",
        [](Address codes, Address scales, Address amax, Address copy, Address scale, bool transposed, const Rows& rows,
           int64_t columns, int tile, int dtype, Address stream) {
            fp8_tile_to_e4m3(at(codes), at(scales), at(amax), at(copy), at(scale), transposed, {rows, columns, tile},
                             dtype, static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("scales"), nb::arg("amax"), nb::arg("copy"), nb::arg("scale"), nb::arg("transposed"),
        nb::arg("rows"), nb::arg("columns"), nb::arg("tile"), nb::arg("dtype"), nb::arg("stream"), guard);
}
