// Where NVIDIA's libraries come from, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "library.h"

namespace nb = nanobind;

void bind_library(nb::module_& m) {
    m.def("set_library_dirs", &surogate::set_library_dirs, nb::arg("directories"),
          "Folders that are searched for libraries which the process has not loaded yet. Holds for later loads.");
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
        "Loads cublasLt and cudnn: a list of {name, path, version, error}. Never raises.");

    // Whoever imports the module may launch at once, so the folders are set here.
    nb::object found = nb::module_::import_("surogate_recipes_bf16.libraries").attr("directories")();
    surogate::set_library_dirs(nb::cast<std::vector<std::string>>(found));
}
