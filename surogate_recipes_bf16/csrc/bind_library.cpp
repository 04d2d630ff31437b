// Python bindings of library.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "library.h"

namespace nb = nanobind;

void bind_library(nb::module_& m) {
    m.def("set_library_dirs", &surogate::set_library_dirs, nb::arg("directories"),
          "Set the folders to search for libraries that the process has not loaded. Affects later loads only.");
    m.def(
        "library_info",
        [] {
            std::vector<surogate::LibraryInfo> infos;
            {
                nb::gil_scoped_release release;
                infos = surogate::library_info();
            }
            nb::list rows;
            for (const surogate::LibraryInfo& info : infos) {
                nb::dict row;
                row["name"] = info.name;
                row["path"] = info.path;
                row["version"] = info.version;
                row["error"] = info.error;
                rows.append(row);
            }
            return rows;
        },
        "Load cublasLt and cudnn, and return a list of {name, path, version, error}. Never raises.");

    // Set on import, because a caller may launch kernels right after it.
    nb::object found = nb::module_::import_("surogate_recipes_bf16.libraries").attr("directories")();
    surogate::set_library_dirs(nb::cast<std::vector<std::string>>(found));
}
