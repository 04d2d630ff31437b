// Element types of buffers, and their codes in the arguments of launchers and bindings: the table DTYPES of
// surogate_core.dtypes. A test compares them.
#pragma once

#include <cstdint>

namespace surogate {

enum DType : int { FP32 = 0, BF16 = 1, FP64 = 2, INT32 = 3, INT64 = 4, E4M3 = 5, E5M2 = 6, UINT8 = 7, E2M1 = 8, UE4M3 = 9, UE8M0 = 10 };

// Bits per element; 0 for an unknown code.
constexpr int bits_of(int dtype) {
    constexpr int bits[] = {32, 16, 64, 32, 64, 8, 8, 8, 4, 8, 8};
    return dtype >= 0 && dtype < 11 ? bits[dtype] : 0;
}

// Bytes per element; 0 for an unknown code and for elements of less than a byte.
constexpr int64_t bytes_of(int dtype) { return bits_of(dtype) / 8; }

constexpr const char* name_of(int dtype) {
    constexpr const char* names[] = {"fp32", "bf16", "fp64", "int32", "int64", "e4m3", "e5m2", "uint8", "e2m1", "ue4m3", "ue8m0"};
    return dtype >= 0 && dtype < 11 ? names[dtype] : "unknown dtype";
}

}  // namespace surogate
