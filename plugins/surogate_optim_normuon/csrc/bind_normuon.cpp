// Python bindings of the launchers in normuon.h. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "normuon.h"

namespace nb = nanobind;

namespace {

surogate::NormuonBatch batch_of(uintptr_t table, int64_t count, int64_t rows, int64_t columns) {
    return {reinterpret_cast<const void*>(table), count, rows, columns};
}

void* at(uintptr_t address) { return reinterpret_cast<void*>(address); }

cudaStream_t stream_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

void bind_normuon(nb::module_& m) {
    const auto guard = nb::call_guard<nb::gil_scoped_release>();
    m.def(
        "clear",
        [](uintptr_t table, int64_t count, uintptr_t stream) {
            surogate::normuon_clear(at(table), count, stream_of(stream));
        },
        nb::arg("table"), nb::arg("count"), nb::arg("stream"), guard);
    m.def(
        "momentum",
        [](uintptr_t table, int64_t count, int64_t rows, int64_t columns, uintptr_t clip_coef, uintptr_t step,
           uintptr_t seed, uintptr_t x, uintptr_t norms, int64_t norms_size, double momentum, int dtype_grad,
           int dtype_momentum, uintptr_t stream) {
            surogate::normuon_momentum(batch_of(table, count, rows, columns), at(clip_coef), at(step), at(seed), at(x),
                                       at(norms), norms_size, momentum, dtype_grad, dtype_momentum, stream_of(stream));
        },
        nb::arg("table"), nb::arg("count"), nb::arg("rows"), nb::arg("columns"), nb::arg("clip_coef"), nb::arg("step"),
        nb::arg("seed"), nb::arg("x"), nb::arg("norms"), nb::arg("norms_size"), nb::arg("momentum"),
        nb::arg("dtype_grad"), nb::arg("dtype_momentum"), nb::arg("stream"), guard);
    m.def(
        "normalize",
        [](uintptr_t table, int64_t count, int64_t rows, int64_t columns, uintptr_t x, uintptr_t norms,
           int64_t norms_size, double safety, double epsilon, uintptr_t stream) {
            surogate::normuon_normalize(batch_of(table, count, rows, columns), at(x), at(norms), norms_size, safety,
                                        epsilon, stream_of(stream));
        },
        nb::arg("table"), nb::arg("count"), nb::arg("rows"), nb::arg("columns"), nb::arg("x"), nb::arg("norms"),
        nb::arg("norms_size"), nb::arg("safety"), nb::arg("epsilon"), nb::arg("stream"), guard);
    m.def(
        "mirror",
        [](uintptr_t square, int64_t count, int64_t side, int64_t height, uintptr_t stream) {
            surogate::normuon_mirror(at(square), count, side, height, stream_of(stream));
        },
        nb::arg("square"), nb::arg("count"), nb::arg("side"), nb::arg("height"), nb::arg("stream"), guard);
    m.def(
        "row_moments",
        [](uintptr_t table, int64_t count, int64_t rows, int64_t columns, uintptr_t clip_coef, uintptr_t o,
           uintptr_t scales, int64_t scales_size, uintptr_t sums, int64_t sums_size, double beta2, uintptr_t stream) {
            surogate::normuon_row_moments(batch_of(table, count, rows, columns), at(clip_coef), at(o), at(scales),
                                          scales_size, at(sums), sums_size, beta2, stream_of(stream));
        },
        nb::arg("table"), nb::arg("count"), nb::arg("rows"), nb::arg("columns"), nb::arg("clip_coef"), nb::arg("o"),
        nb::arg("scales"), nb::arg("scales_size"), nb::arg("sums"), nb::arg("sums_size"), nb::arg("beta2"),
        nb::arg("stream"), guard);
    m.def(
        "update",
        [](uintptr_t table, int64_t count, int64_t rows, int64_t columns, uintptr_t clip_coef, uintptr_t lr,
           uintptr_t step, uintptr_t seed, uintptr_t o, uintptr_t scales, int64_t scales_size, uintptr_t sums,
           int64_t sums_size, double weight_decay, bool cautious, double factor, bool divided, int dtype_master,
           int dtype_copy, uintptr_t stream) {
            surogate::normuon_update(batch_of(table, count, rows, columns), at(clip_coef), at(lr), at(step), at(seed),
                                     at(o), at(scales), scales_size, at(sums), sums_size,
                                     {weight_decay, cautious, factor, divided, dtype_master, dtype_copy},
                                     stream_of(stream));
        },
        nb::arg("table"), nb::arg("count"), nb::arg("rows"), nb::arg("columns"), nb::arg("clip_coef"), nb::arg("lr"),
        nb::arg("step"), nb::arg("seed"), nb::arg("o"), nb::arg("scales"), nb::arg("scales_size"), nb::arg("sums"),
        nb::arg("sums_size"), nb::arg("weight_decay"), nb::arg("cautious"), nb::arg("factor"), nb::arg("divided"),
        nb::arg("dtype_master"), nb::arg("dtype_copy"), nb::arg("stream"), guard);
}
