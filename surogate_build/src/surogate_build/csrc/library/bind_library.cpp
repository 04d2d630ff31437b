// Python binding of <surogate/library.h>.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "surogate/library.h"

namespace nb = nanobind;

void bind_library(nb::module_& m) {
    m.def("set_library_dirs", &surogate::set_library_dirs, nb::arg("directories"),
          "Set the folders to search for libraries that the process has not loaded. Affects later loads only.");

    // Set on import, because a caller may launch kernels right after it.
    nb::object found = nb::module_::import_("surogate_core.machine.nvidia_wheels").attr("library_dirs")();
    surogate::set_library_dirs(nb::cast<std::vector<std::string>>(found));
}
