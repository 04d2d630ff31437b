// Python bindings of launchers, which take raw pointers and sizes, and last the stream.
//
//   bind_launcher(m, "scale", scale);
//   bind_launcher(m, "shift", +[](const void* x, int64_t rows, int64_t columns, cudaStream_t stream) {
//       shift(x, {rows, columns}, stream);                       // for a launcher that takes structs
//   });
//
// Python passes all arguments by position, and addresses as integers: of buffers and of the stream. The launcher runs
// without the GIL. It may throw, as the checks of check.h do.
#pragma once

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <type_traits>

namespace surogate {

namespace detail {

template <class T>
using Passed = std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>;

template <class T>
T received(Passed<T> argument) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(argument);
    } else {
        return argument;
    }
}

}  // namespace detail

template <class... Arguments>
void bind_launcher(nanobind::module_& m, const char* name, void (*launcher)(Arguments...)) {
    m.def(
        name,
        [launcher](detail::Passed<Arguments>... arguments) { launcher(detail::received<Arguments>(arguments)...); },
        nanobind::call_guard<nanobind::gil_scoped_release>());
}

// Binds begin, chunk and end of a head (lm_head.h).
template <class Head>
void bind_chunks(nanobind::class_<Head>& bound) {
    using release = nanobind::call_guard<nanobind::gil_scoped_release>;
    using Stream = detail::Passed<cudaStream_t>;
    bound.def("begin", [](Head& self, Stream s) { self.begin(detail::received<cudaStream_t>(s)); }, release())
        .def("chunk", [](Head& self, int64_t i, Stream s) { self.chunk(i, detail::received<cudaStream_t>(s)); }, release())
        .def("end", [](Head& self, Stream s) { self.end(detail::received<cudaStream_t>(s)); }, release());
}

}  // namespace surogate
