// NVIDIA's libraries, found when they are first needed: nothing is linked, so the module imports on any machine.
//
// A library is looked for in this order:
//   1. the folders of the environment variable SUROGATE_LIBRARY_PATH, separated by ':'
//   2. what the process has loaded already (torch loads its own): never two copies by accident
//   3. the folders of the installed wheels, which Python passes to set_library_dirs when it imports the module
//   4. wherever the loader looks for the plain name
// A file that is found in a folder and does not load is an error; another copy is not tried in its place. Errors are
// std::runtime_error and tell what was tried and which package brings the library.
//
// None of this is for the hot path: call it while binding and keep what it returns.
#pragma once

#include <string>
#include <vector>

namespace surogate {

// A handle of dlopen. It stays open until the process ends.
using Library = void*;

// Loaded on the first call, checked to be at least the version that we need, then the same handle. Thread-safe.
Library cublaslt();
// Brings up what cuDNN itself looks for by name: NVRTC, cuBLASLt and the shared CUDA runtime.
Library cudnn();

// Any other: `package` is what to pip install when it is missing. Not cached here; the loader counts references.
Library library(const char* soname, const char* package);

// The address of a function; throws if the library lacks it.
void* address(Library library, const char* name);

// const auto matmul = symbol<decltype(&cublasLtMatmul)>(cublaslt(), "cublasLtMatmul");
template <class Function>
Function symbol(Library library, const char* name) {
    return reinterpret_cast<Function>(address(library, name));
}

void set_library_dirs(std::vector<std::string> directories);

struct LibraryInfo {
    std::string name;     // "cublasLt", "cudnn"
    std::string path;     // of the file that was loaded
    std::string version;  // "13.10.0", "9.28.0"
    std::string error;    // why it could not be loaded, or empty
};

// Loads the libraries if they are not loaded yet. Does not throw.
std::vector<LibraryInfo> library_info();

}  // namespace surogate
