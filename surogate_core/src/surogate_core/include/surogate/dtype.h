// Element types of buffers, and their codes in the arguments of launchers and bindings.
#pragma once

#include <cstdint>

namespace surogate {

enum DType : int { FP32 = 0, BF16 = 1, FP64 = 2, INT32 = 3, INT64 = 4, E4M3 = 5, E5M2 = 6, UINT8 = 7 };

// Bytes per element; 0 for an unknown code.
constexpr int64_t bytes_of(int dtype) {
    switch (dtype) {
        case FP64:
        case INT64:
            return 8;
        case FP32:
        case INT32:
            return 4;
        case BF16:
            return 2;
        case E4M3:
        case E5M2:
        case UINT8:
            return 1;
        default:
            return 0;
    }
}

constexpr const char* name_of(int dtype) {
    constexpr const char* names[] = {"fp32", "bf16", "fp64", "int32", "int64", "e4m3", "e5m2", "uint8"};
    return dtype >= 0 && dtype < 8 ? names[dtype] : "unknown dtype";
}

}  // namespace surogate
