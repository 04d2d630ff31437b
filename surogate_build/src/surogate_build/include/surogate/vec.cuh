// Conversions to and from float, and vectorized accesses to global memory.
//
//   using V = Vec<__nv_bfloat16>;                // 8 elements; Vec<float> has 4, Vec<double> 2
//   V x = V::load(in + i);                       // `in + i` aligned to 16 bytes
//   float f[V::size]; x.to_float(f); ...; V::from_float(f).store(out + i);
//   Packed<__nv_bfloat16> y;                     // held in half as many registers as floats, across a reduction
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace surogate {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest even.
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ double from_float<double>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

namespace detail {
template <int Bytes>
struct Word;
template <>
struct Word<16> {
    using type = uint4;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<4> {
    using type = uint32_t;
};
template <>
struct Word<2> {
    using type = uint16_t;
};
template <>
struct Word<1> {
    using type = uint8_t;
};
}  // namespace detail

// N elements that are loaded or stored by one access of N * sizeof(T) bytes (1, 2, 4, 8 or 16). Addresses must be
// aligned to that size.
template <class T, int N = 16 / sizeof(T)>
struct alignas(N * sizeof(T)) Vec {
    static constexpr int size = N;
    using Word = typename detail::Word<N * sizeof(T)>::type;

    T values[N];

    __device__ __forceinline__ T& operator[](int i) { return values[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return values[i]; }

    static __device__ __forceinline__ Vec load(const T* address) {
        return from_word(*reinterpret_cast<const Word*>(address));
    }
    __device__ __forceinline__ void store(T* address) const { *reinterpret_cast<Word*>(address) = word(); }

    __device__ __forceinline__ void to_float(float (&out)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            out[i] = surogate::to_float(values[i]);
        }
    }
    static __device__ __forceinline__ Vec from_float(const float (&in)[N]) {
        Vec v;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            v.values[i] = surogate::from_float<T>(in[i]);
        }
        return v;
    }

private:
    // memcpy avoids violating strict aliasing. The compiler turns it into register moves.
    static __device__ __forceinline__ Vec from_word(Word word) {
        Vec v;
        memcpy(&v.values, &word, sizeof(word));
        return v;
    }
    __device__ __forceinline__ Word word() const {
        Word word;
        memcpy(&word, &values, sizeof(word));
        return word;
    }
};

namespace detail {
// Optimization barriers: the compiler does not know that the word is unchanged.
__device__ __forceinline__ void hide(uint4& w) { asm("" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w)); }
__device__ __forceinline__ void hide(uint2& w) { asm("" : "+r"(w.x), "+r"(w.y)); }
__device__ __forceinline__ void hide(uint32_t& w) { asm("" : "+r"(w)); }
__device__ __forceinline__ void hide(uint16_t& w) { asm("" : "+h"(w)); }
}  // namespace detail

// N elements held as they are in memory, in N * sizeof(T) bytes of registers. (An array of bf16 takes one register per
// element.) Each call of `to_float` converts anew: the compiler cannot keep the floats of an earlier call, which take
// twice as many registers as bf16, across a loop or a reduction.
template <class T, int N = 16 / sizeof(T)>
struct Packed {
    using Word = typename Vec<T, N>::Word;

    Word word;

    static __device__ __forceinline__ Packed load(const T* address) {
        return {*reinterpret_cast<const Word*>(address)};
    }
    __device__ __forceinline__ void store(T* address) const { *reinterpret_cast<Word*>(address) = word; }

    __device__ __forceinline__ void to_float(float* out) {
        detail::hide(word);
        T values[N];
        memcpy(values, &word, sizeof(word));
#pragma unroll
        for (int i = 0; i < N; ++i) {
            out[i] = surogate::to_float(values[i]);
        }
    }
    static __device__ __forceinline__ Packed from_float(const float* in) {
        T values[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            values[i] = surogate::from_float<T>(in[i]);
        }
        Packed packed;
        memcpy(&packed.word, values, sizeof(packed.word));
        return packed;
    }
};

}  // namespace surogate
