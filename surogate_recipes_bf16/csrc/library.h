// Run-time loading of NVIDIA's libraries. Nothing is linked, so the module can be imported on any machine.
//
// A library is searched in this order:
//   1. the folders of the environment variable SUROGATE_LIBRARY_PATH, separated by ':'
//   2. the libraries that the process has already loaded (torch loads its own), to avoid a second copy
//   3. the folders of the installed wheels, which Python passes to set_library_dirs when it imports the module
//   4. the search path of the loader
// If a file in one of these folders does not load, that is an error; no other copy is tried. Errors are
// std::runtime_error and name the locations searched and the package that provides the library.
//
// These functions are slow: call them while binding and keep the result.
#pragma once

#include <string>
#include <vector>

namespace surogate {

// A dlopen handle. It is never closed.
using Library = void*;

// Load the library on the first call and check its minimum version. Later calls return the same handle. Thread-safe.
Library cublaslt();
// Also loads the libraries that cuDNN looks up by name: NVRTC, cuBLASLt and the shared CUDA runtime.
Library cudnn();

// Loads any library. `package` is the pip package that the error message suggests. Not cached; the loader counts
// references.
Library library(const char* soname, const char* package);

// Returns the address of a function. Throws if the library does not export it.
void* address(Library library, const char* name);

// const auto matmul = symbol<decltype(&cublasLtMatmul)>(cublaslt(), "cublasLtMatmul");
template <class Function>
Function symbol(Library library, const char* name) {
    return reinterpret_cast<Function>(address(library, name));
}

void set_library_dirs(std::vector<std::string> directories);

struct LibraryInfo {
    std::string name;     // "cublasLt", "cudnn"
    std::string path;     // the file that was loaded
    std::string version;  // "13.10.0", "9.28.0"
    std::string error;    // the reason why it could not be loaded, or empty
};

// Loads the libraries if necessary and describes them. Does not throw.
std::vector<LibraryInfo> library_info();

}  // namespace surogate
