// Python bindings of the launchers in nvfp4.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "nvfp4.h"

namespace nb = nanobind;
using namespace surogate;

namespace {

using Address = uintptr_t;

void* at(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace

void bind_nvfp4(nb::module_& m) {
    const auto guard = nb::call_guard<nb::gil_scoped_release>();
    m.def(
        "nvfp4_quantize",
        [](Address x, Address codes, Address scales, Address amax, Address column_codes, Address column_scales,
           Address column_amax, Address measured, int64_t rows, int64_t columns, bool square, bool hadamard,
           bool four_over_six, bool stochastic, Address micro_step, Address seed, int64_t random_stream, Address stream) {
            nvfp4_quantize(at(x), {at(codes), at(scales), at(amax)}, {at(column_codes), at(column_scales), at(column_amax)},
                           at(measured), rows, columns,
                           {square, hadamard, four_over_six, stochastic, at(micro_step), at(seed), random_stream},
                           static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("x"), nb::arg("codes"), nb::arg("scales"), nb::arg("amax"), nb::arg("column_codes"),
        nb::arg("column_scales"), nb::arg("column_amax"), nb::arg("measured"), nb::arg("rows"), nb::arg("columns"),
        nb::arg("square"), nb::arg("hadamard"), nb::arg("four_over_six"), nb::arg("stochastic"), nb::arg("micro_step"),
        nb::arg("seed"), nb::arg("random_stream"), nb::arg("stream"), guard);
    m.def(
        "nvfp4_dequantize",
        [](Address codes_a, Address scales_a, Address amax_a, Address a, int64_t rows_a, int64_t columns_a,
           Address codes_b, Address scales_b, Address amax_b, Address b, int64_t rows_b, int64_t columns_b,
           Address factors, float beta, Address stream) {
            nvfp4_dequantize({at(codes_a), at(scales_a), at(amax_a), at(a), rows_a, columns_a},
                             {at(codes_b), at(scales_b), at(amax_b), at(b), rows_b, columns_b}, at(factors), beta,
                             static_cast<cudaStream_t>(at(stream)));
        },
        nb::arg("codes_a"), nb::arg("scales_a"), nb::arg("amax_a"), nb::arg("a"), nb::arg("rows_a"), nb::arg("columns_a"),
        nb::arg("codes_b"), nb::arg("scales_b"), nb::arg("amax_b"), nb::arg("b"), nb::arg("rows_b"), nb::arg("columns_b"),
        nb::arg("factors"), nb::arg("beta"), nb::arg("stream"), guard);
}
