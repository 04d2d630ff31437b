// Where the scale of an FP8 tensor comes from, as launchers receive it.
//
// A scale is fp32 [2] = (decode, encode), an amax fp32 [2] = (largest finite |x|, 1 if an x was not finite).
#pragma once

#include <cstdint>

namespace surogate {

// The attr `scaling` of ops. The codes are those of kernels/quantizers.py.
enum Scaling : int {
    kDelayed = 0,   // uses `given`, raises `amax`
    kGiven = 1,     // uses `given`
    kCurrent = 2,   // measures, writes `out`, raises `amax` if there is one
    kFallback = 3,  // `given` where it is initialised, otherwise measures; writes `out`
};

struct Scale {
    int scaling;
    const float* given;  // null with kCurrent
    float* amax;         // null with kGiven and kFallback, and possibly with kCurrent
    float* out;          // kCurrent, kFallback
    float* measured;     // kCurrent, kFallback: workspace of 8 bytes, the amax of this tensor

    bool measures() const { return scaling == kCurrent || scaling == kFallback; }

    // Returns the scale that makes a measurement unnecessary if it is initialised, or null.
    const float* unless() const { return scaling == kFallback ? given : nullptr; }
};

// Throws if a pointer that `scaling` needs is null.
void check_scale(const Scale& scale, const char* op);

}  // namespace surogate
