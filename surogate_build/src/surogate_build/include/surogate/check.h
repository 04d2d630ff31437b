// Checks for launchers: arguments before the launch, the launch itself afterwards. Host code only.
//
//   SUROGATE_REQUIRE(rows > 0, "rmsnorm", "rows must be positive, got " + std::to_string(rows));
//   rmsnorm_kernel<<<grid, block, 0, stream>>>(...);
//   check_launch("rmsnorm");
//
// The message is constructed only if the condition is false.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

// Throws std::invalid_argument "op: message". `message` is any expression that can be appended to a std::string.
#define SUROGATE_REQUIRE(condition, op, message)                                     \
    do {                                                                             \
        if (!(condition)) {                                                          \
            throw std::invalid_argument(std::string(op) + ": " + (message));         \
        }                                                                            \
    } while (false)

namespace surogate {

inline bool is_aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

inline void check_pointer(const void* pointer, const char* op, const char* argument, uintptr_t alignment = 1) {
    SUROGATE_REQUIRE(pointer != nullptr, op, std::string(argument) + " is a null pointer");
    SUROGATE_REQUIRE(is_aligned(pointer, alignment), op,
                     std::string(argument) + " must be aligned to " + std::to_string(alignment) + " bytes");
}

// Checks pointers for the alignment of their elements. Errors name them by their place, from 1.
template <class... T>
void check_pointers(const char* op, const T*... pointers) {
    int place = 0;
    (check_pointer(pointers, op, ("pointer " + std::to_string(++place)).c_str(), alignof(T)), ...);
}

inline void check_positive(int64_t value, const char* op, const char* argument) {
    SUROGATE_REQUIRE(value > 0, op, std::string(argument) + " must be positive, got " + std::to_string(value));
}

// Converts an extent to int, for library and grid arguments. Throws if it does not fit in 31 bits.
inline int to_int(int64_t value, const char* op, const char* argument) {
    SUROGATE_REQUIRE(value >= 0 && value <= std::numeric_limits<int>::max(), op,
                     std::string(argument) + " must fit in 31 bits, got " + std::to_string(value));
    return static_cast<int>(value);
}

// Throws std::runtime_error if a CUDA runtime call failed.
inline void check_cuda(cudaError_t status, const char* op) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string(op) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
    }
}

// Checks for launch errors. Errors during execution of the kernel are reported by a later synchronizing call.
inline void check_launch(const char* op) { check_cuda(cudaGetLastError(), op); }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace surogate
