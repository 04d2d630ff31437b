// Run-time loading of NVIDIA's libraries: `surogate_add_kernels(my_package USES library)`. Nothing is linked, so the
// module can be imported on any machine.
//
// A library is searched in this order:
//   1. the folders of the environment variable SUROGATE_LIBRARY_PATH, separated by ':'
//   2. the libraries that the process has already loaded (torch loads its own), to avoid a second copy
//   3. the folders of the installed wheels, which Python passes to set_library_dirs when it imports the module
//   4. the search path of the loader
// If a file in one of these folders does not load, that is an error; no other copy is tried. Errors are
// std::runtime_error and name the locations searched and the package that provides the library.
//
// Every module has its own copy of this code. A library is loaded once per process nevertheless: for modules after the
// first, it is one that the process has already loaded.
//
// These functions are slow: call them while binding and keep the result.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace surogate {

// A dlopen handle. It is never closed.
using Library = void*;

// Loads a library. `package` is the pip package that the error message suggests. Not cached; the loader counts
// references. Thread-safe.
Library library(const char* soname, const char* package);

// Returns `library` if its version is at least `minimum`, otherwise throws. Versions are major * 10000 + minor * 100 +
// patch; `function` is the name of the function that returns that of the library.
Library at_least(size_t minimum, Library library, const char* function, const char* package);

// Returns the file that a library was loaded from.
std::string path_of(Library library);

// Returns the address of a function. Throws if the library does not export it.
void* address(Library library, const char* name);

// const auto matmul = symbol<decltype(&cublasLtMatmul)>(cublaslt(), "cublasLtMatmul");
template <class Function>
Function symbol(Library library, const char* name) {
    return reinterpret_cast<Function>(address(library, name));
}

void set_library_dirs(std::vector<std::string> directories);

struct LibraryInfo {
    std::string name;     // "cublasLt"
    std::string path;     // the file that was loaded
    std::string version;  // "13.10.0", "9.28.0"
    std::string error;    // the reason why it could not be loaded, or empty
};

// Calls `load` and describes the library. Does not throw.
LibraryInfo describe_library(const char* name, const std::function<Library()>& load, const char* version_function);

}  // namespace surogate
