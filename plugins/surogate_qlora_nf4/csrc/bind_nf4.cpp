// Python bindings of the launchers in nf4.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "nf4.h"

namespace nb = nanobind;
using namespace surogate;

namespace {

using Address = uintptr_t;
using Rows = std::vector<int64_t>;

void* at(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

void bind_nf4(nb::module_& m) {
    const auto guard = nb::call_guard<nb::gil_scoped_release>();
    m.def(
        "nf4_quantize",
        [](Address w, Address codes, Address absmax, const Rows& rows, int64_t columns, int block, int dtype,
           Address stream) {
            nf4_quantize(at(w), at(codes), at(absmax), {rows, columns, block}, dtype,
                         static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("w"), nb::arg("codes"), nb::arg("absmax"), nb::arg("rows"), nb::arg("columns"), nb::arg("block"),
        nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "nf4_compress",
        [](Address absmax, Address sums, Address codes, Address nested, Address offset, Address map, const Rows& rows,
           int64_t columns, int block, Address stream) {
            nf4_compress(at(absmax), at(sums), at(codes), at(nested), at(offset), at(map), {rows, columns, block},
                         static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("absmax"), nb::arg("sums"), nb::arg("codes"), nb::arg("nested"), nb::arg("offset"), nb::arg("map"),
        nb::arg("rows"), nb::arg("columns"), nb::arg("block"), nb::arg("stream"), guard);
    m.def(
        "nf4_dequantize",
        [](Address codes, Address absmax, Address nested, Address offset, Address map, Address out, const Rows& rows,
           int64_t columns, int block, int dtype, Address stream) {
            nf4_dequantize(at(codes), {at(absmax), at(nested), at(offset), at(map)}, at(out), {rows, columns, block},
                           dtype, static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("absmax"), nb::arg("nested"), nb::arg("offset"), nb::arg("map"), nb::arg("out"),
        nb::arg("rows"), nb::arg("columns"), nb::arg("block"), nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "nf4_amax",
        [](Address codes, Address absmax, Address nested, Address offset, Address map, Address amax, const Rows& rows,
           int64_t columns, int block, int dtype, Address stream) {
            nf4_amax(at(codes), {at(absmax), at(nested), at(offset), at(map)}, at(amax), {rows, columns, block}, dtype,
                     static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("absmax"), nb::arg("nested"), nb::arg("offset"), nb::arg("map"), nb::arg("amax"),
        nb::arg("rows"), nb::arg("columns"), nb::arg("block"), nb::arg("dtype"), nb::arg("stream"), guard);
    m.def(
        "nf4_to_e4m3",
        [](Address codes, Address absmax, Address nested, Address offset, Address map, Address amax, Address copy,
           Address scale, bool transposed, const Rows& rows, int64_t columns, int block, int dtype, Address stream) {
            nf4_to_e4m3(at(codes), {at(absmax), at(nested), at(offset), at(map)}, at(amax), at(copy), at(scale),
                        transposed, {rows, columns, block}, dtype, static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes"), nb::arg("absmax"), nb::arg("nested"), nb::arg("offset"), nb::arg("map"), nb::arg("amax"),
        nb::arg("copy"), nb::arg("scale"), nb::arg("transposed"), nb::arg("rows"), nb::arg("columns"), nb::arg("block"),
        nb::arg("dtype"), nb::arg("stream"), guard);
}
