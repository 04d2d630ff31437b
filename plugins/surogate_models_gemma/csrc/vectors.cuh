// Grids of elementwise kernels: a thread processes one vector of 16 bytes, or one element where pointers or sizes do not
// allow it.
#pragma once

#include <surogate/check.h>
#include <surogate/dtype.h>
#include <surogate/vec.cuh>

#include <initializer_list>
#include <string>

namespace surogate {

constexpr int vector_threads = 256;

// Whether runs of `elements` elements can be accessed by vectors of n.
inline bool has_vectors(int64_t elements, int n, std::initializer_list<const void*> pointers) {
    for (const void* pointer : pointers) {
        if (!is_aligned(pointer, 16)) {
            return false;
        }
    }
    return elements % n == 0;
}

// Calls launch(value of the element type).
template <class Launch>
void by_dtype(int dtype, const char* op, Launch launch) {
    switch (dtype) {
        case FP32:
            return launch(float{});
        case BF16:
            return launch(__nv_bfloat16{});
        default:
            SUROGATE_REQUIRE(false, op, std::string("dtype must be fp32 or bf16, got ") + name_of(dtype));
    }
}

}  // namespace surogate
