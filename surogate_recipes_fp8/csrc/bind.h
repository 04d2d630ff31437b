// What the bindings share: pointers and streams as integers, and the arguments of a scale.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "scale.h"

namespace surogate {

using Address = uintptr_t;

inline void* pointer(Address address) { return reinterpret_cast<void*>(address); }
inline float* floats(Address address) { return reinterpret_cast<float*>(address); }
inline cudaStream_t stream_of(Address stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace surogate

#define SUROGATE_SCALE_PARAMETERS int scaling, Address scale, Address amax, Address scale_out, Address measured
#define SUROGATE_SCALE \
    Scale { scaling, floats(scale), floats(amax), floats(scale_out), floats(measured) }
#define SUROGATE_SCALE_NAMES \
    nb::arg("scaling"), nb::arg("scale"), nb::arg("amax"), nb::arg("scale_out"), nb::arg("measured")
