// The check of products that are compiled for the SM90 (H100, H200) alone. Host code only.
#pragma once

#include "surogate/check.h"

namespace surogate {

// Throws std::runtime_error if the current GPU is another one.
inline void require_sm90(const std::string& op) {
    int device = 0, major = 0, minor = 0;
    check_cuda(cudaGetDevice(&device), op.c_str());
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op.c_str());
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), op.c_str());
    if (major != 9 || minor != 0) {
        throw std::runtime_error(op + ": needs SM90, this GPU is SM" + std::to_string(10 * major + minor));
    }
}

}  // namespace surogate
