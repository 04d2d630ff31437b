// Limits of dynamic shared memory. Host code only.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "surogate/check.h"

namespace surogate {

// Lets launches of `kernel` have `bytes` of dynamic shared memory. This is not a stream operation, so it is allowed during
// capture. Never lowers the limit: a thread of another rank on this GPU may be about to launch the kernel with more.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes, const char* op) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), op);
    if (bytes > attributes.maxDynamicSharedSizeBytes) {
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    }
}

}  // namespace surogate
