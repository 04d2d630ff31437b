// The check of what CUTLASS returns. Host code only.
#pragma once

#include <cutlass/cutlass.h>

#include "surogate/check.h"

namespace surogate {

// Throws std::runtime_error if a call of CUTLASS failed.
inline void check_status(cutlass::Status status, const char* op, const char* call) {
    if (status != cutlass::Status::kSuccess) {
        throw std::runtime_error(std::string(op) + ": " + call + ": " + cutlass::cutlassGetStatusString(status));
    }
}

}  // namespace surogate
