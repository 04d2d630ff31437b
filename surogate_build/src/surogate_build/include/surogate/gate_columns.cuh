// Gates and values in rows of 2 width columns: [gates; values] or, interleaved, in turn. A thread has eight of both, which
// are two octets in memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace surogate {

template <bool Interleaved>
struct GateColumns {
    // The columns of the octets of the gates from `column` on, a multiple of 8.
    static __device__ __forceinline__ int64_t first(int64_t column) { return Interleaved ? 2 * column : column; }
    static __device__ __forceinline__ int64_t second(int64_t column, int64_t width) {
        return Interleaved ? 2 * column + 8 : width + column;
    }

    // Turns the two octets into gates and values.
    static __device__ __forceinline__ void split(float (&first)[8], float (&second)[8]) {
        if constexpr (Interleaved) {
            float gate[8], up[8];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                gate[c] = first[2 * c];
                up[c] = first[2 * c + 1];
                gate[c + 4] = second[2 * c];
                up[c + 4] = second[2 * c + 1];
            }
            copy(gate, first);
            copy(up, second);
        }
    }
    // Turns gates and values into the two octets.
    static __device__ __forceinline__ void join(float (&gate)[8], float (&up)[8]) {
        if constexpr (Interleaved) {
            float first[8], second[8];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                first[2 * c] = gate[c];
                first[2 * c + 1] = up[c];
                second[2 * c] = gate[c + 4];
                second[2 * c + 1] = up[c + 4];
            }
            copy(first, gate);
            copy(second, up);
        }
    }

private:
    static __device__ __forceinline__ void copy(const float (&from)[8], float (&to)[8]) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            to[c] = from[c];
        }
    }
};

}  // namespace surogate
