#include "cudnn_library.h"

#include <cstdlib>

#include "surogate/cublaslt.h"

namespace surogate {
namespace {

constexpr size_t minimum_cudnn = 91800;  // first version with all features that attention uses

}  // namespace

Library cudnn() {
    static const Library handle = [] {
        library("libnvrtc.so.13", "'nvidia-cuda-nvrtc>=13,<14'");
        cublaslt();
        const Library runtime = library("libcudart.so.13", "'nvidia-cuda-runtime>=13,<14'");
        // Without this variable, the cuDNN frontend uses the first of several installed versions of the runtime.
        setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", path_of(runtime).c_str(), /*overwrite=*/0);
        return at_least(minimum_cudnn, library("libcudnn.so.9", "'nvidia-cudnn-cu13>=9.18'"), "cudnnGetVersion",
                        "'nvidia-cudnn-cu13>=9.18'");
    }();
    return handle;
}

}  // namespace surogate
