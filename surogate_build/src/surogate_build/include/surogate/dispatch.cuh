// Dispatch from dtype codes to types, and selection of the vector width of a kernel. Host code only.
#pragma once

#include <surogate/check.h>
#include <surogate/dtype.h>
#include <surogate/vec.cuh>

#include <initializer_list>
#include <string>

namespace surogate {

template <class T>
struct Type {
    using type = T;
};

// Calls function(Type<float>{}) or function(Type<__nv_bfloat16>{}):
//   with_float_type(dtype, "add", "a", [&](auto t) { using T = typename decltype(t)::type; ... });
template <class Function>
void with_float_type(int dtype, const char* op, const char* argument, Function&& function) {
    switch (dtype) {
        case FP32:
            return function(Type<float>{});
        case BF16:
            return function(Type<__nv_bfloat16>{});
        default:
            SUROGATE_REQUIRE(false, op, std::string(argument) + " must be fp32 or bf16, not " + name_of(dtype));
    }
}

// Number of elements of T, or of the wider of T and U, in 16 bytes.
template <class T, class U = T>
constexpr int vector_width = 16 / static_cast<int>(sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U));

inline bool all_aligned(std::initializer_list<const void*> pointers, uintptr_t bytes = 16) {
    for (const void* pointer : pointers) {
        if (!is_aligned(pointer, bytes)) {
            return false;
        }
    }
    return true;
}

// bf16 gradients are never accumulated into, because an addend much smaller than the sum would be lost.
inline void check_accumulate(bool accumulate, int dtype, const char* op) {
    SUROGATE_REQUIRE(!accumulate || dtype == FP32, op,
                     std::string("only adds to fp32 outputs, the output is ") + name_of(dtype));
}

}  // namespace surogate
