// Python binding that describes the libraries of this module.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cudnn_library.h"
#include "surogate/cublaslt.h"

namespace nb = nanobind;

void bind_libraries(nb::module_& m) {
    m.def(
        "library_info",
        [] {
            std::vector<surogate::LibraryInfo> infos;
            {
                nb::gil_scoped_release release;
                infos = {surogate::describe_library("cublasLt", surogate::cublaslt, "cublasLtGetVersion"),
                         surogate::describe_library("cudnn", surogate::cudnn, "cudnnGetVersion")};
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
}
