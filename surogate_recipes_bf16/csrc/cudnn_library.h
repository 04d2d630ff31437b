// cuDNN, which is loaded at run time.
#pragma once

#include <surogate/library.h>

namespace surogate {

// Loads cuDNN on the first call, and the libraries that it looks up by name: NVRTC, cuBLASLt and the shared CUDA runtime.
// Later calls return the same handle. Thread-safe.
Library cudnn();

}  // namespace surogate
