// Python bindings of the products. Pointers are passed as integers; the stream is the last argument.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_product(nb::module_&) {}
