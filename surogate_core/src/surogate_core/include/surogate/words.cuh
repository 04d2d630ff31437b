// Eight consecutive elements in registers as they are in memory, so that loads of several tensors are issued before the
// first of them is converted.
//
//   auto x = Words<T>::load(base, first);    // T: float or __nv_bfloat16; base + first is aligned to 16 bytes
//   x.get(i)                                 // element i as a float
//   Words<T>::nearest(values)                // eight floats, rounded to nearest
//   Words<T>::rounded(values, random, s)     // rounded stochastically with random(s), which float does not need
//   store_whole(address, x)                  // by accesses of 16 bytes, also after shuffles
//   largest.add(x); largest.bits()           // largest magnitude
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "surogate/octet.cuh"
#include "surogate/philox.cuh"

namespace surogate {

namespace detail {
template <int Words>
__device__ __forceinline__ void load_words(const void* address, uint32_t (&word)[Words]) {
    __builtin_assume(__isGlobal(address));
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
        const uint4 w = static_cast<const uint4*>(address)[i / 4];
        word[i] = w.x;
        word[i + 1] = w.y;
        word[i + 2] = w.z;
        word[i + 3] = w.w;
    }
}

template <int Words>
__device__ __forceinline__ void store_words(void* address, const uint32_t (&word)[Words]) {
    __builtin_assume(__isGlobal(address));
#pragma unroll
    for (int i = 0; i < Words; i += 4) {
        static_cast<uint4*>(address)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
    }
}
}  // namespace detail

template <class T>
struct Words;

template <>
struct Words<float> {
    uint32_t word[octet];

    static __device__ __forceinline__ Words load(const void* base, int64_t first) {
        Words words;
        detail::load_words(static_cast<const float*>(base) + first, words.word);
        return words;
    }
    __device__ __forceinline__ void store(void* base, int64_t first) const {
        detail::store_words(static_cast<float*>(base) + first, word);
    }
    __device__ __forceinline__ float get(int i) const { return __uint_as_float(word[i]); }

    static __device__ __forceinline__ Words nearest(const float (&x)[octet]) {
        Words words;
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            words.word[i] = __float_as_uint(x[i]);
        }
        return words;
    }
    template <class Random>
    static __device__ __forceinline__ Words rounded(const float (&x)[octet], Random&&, uint32_t) {
        return nearest(x);
    }
};

template <>
struct Words<__nv_bfloat16> {
    uint32_t word[octet / 2];

    static __device__ __forceinline__ Words load(const void* base, int64_t first) {
        Words words;
        detail::load_words(static_cast<const __nv_bfloat16*>(base) + first, words.word);
        return words;
    }
    __device__ __forceinline__ void store(void* base, int64_t first) const {
        detail::store_words(static_cast<__nv_bfloat16*>(base) + first, word);
    }
    __device__ __forceinline__ float get(int i) const {
        return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
    }

    static __device__ __forceinline__ Words nearest(const float (&x)[octet]) {
        Words words;
#pragma unroll
        for (int i = 0; i < octet / 2; ++i) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
            memcpy(&words.word[i], &pair, sizeof(pair));
        }
        return words;
    }

    // As `stochastic_round_bf16`, for values that are not NaN. An infinity stays one: its low bits are 0.
    template <class Random>
    static __device__ __forceinline__ Words rounded(const float (&x)[octet], Random&& random, uint32_t stream) {
        const PhiloxWords bits = random(stream);
        Words words;
#pragma unroll
        for (int i = 0; i < octet / 2; ++i) {
            const uint32_t low = __float_as_uint(x[2 * i]) + (bits.word[i] & 0xffffu);
            const uint32_t high = __float_as_uint(x[2 * i + 1]) + (bits.word[i] >> 16);
            words.word[i] = __byte_perm(low, high, 0x7632);
        }
        return words;
    }
};

// Stores an octet at an address in global memory that is aligned to 16 bytes. nvcc 13.0 splits the stores of `Words` into
// words of 4 bytes after shuffles, which takes four times as many instructions.
template <class T>
__device__ __forceinline__ void store_whole(T* address, const Words<T>& words) {
    constexpr int parts = sizeof(words.word) / 16;
#pragma unroll
    for (int i = 0; i < parts; ++i) {
        const uint32_t* word = words.word + 4 * i;
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     :
                     : "l"(__cvta_generic_to_global(address + 16 / sizeof(T) * i)), "r"(word[0]), "r"(word[1]),
                       "r"(word[2]), "r"(word[3])
                     : "memory");
    }
}

// The largest magnitude of all elements added. Magnitudes are compared as integers, so NaN is larger than infinity.
class Largest {
public:
    __device__ __forceinline__ void add(const Words<float>& x) {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            single_ = max(single_, x.word[i] & 0x7fffffffu);
        }
    }
    __device__ __forceinline__ void add(const Words<__nv_bfloat16>& x) {
#pragma unroll
        for (int i = 0; i < octet / 2; ++i) {
            pair_ = __vmaxu2(pair_, x.word[i] & 0x7fff7fffu);
        }
    }
    // Returns the bits of the magnitude as a float.
    __device__ __forceinline__ uint32_t bits() const { return max(single_, max(pair_ << 16, pair_ & 0xffff0000u)); }

private:
    uint32_t pair_ = 0;
    uint32_t single_ = 0;
};

}  // namespace surogate
