// Eight consecutive elements in registers as they are in memory, so that loads of several tensors are issued before the
// first of them is converted.
//
//   auto x = Words<T>::load(base, first);    // T: float or __nv_bfloat16; base + first is aligned to 16 bytes
//   x.get(i)                                 // element i as a float
//   Words<T>::nearest(values)                // eight floats, rounded to nearest
//   Words<T>::rounded(values, random, s)     // rounded stochastically with random(s), which float does not need
//   store_whole(address, x)                  // by accesses of 16 bytes, also after shuffles
//   OctetPerLane::load<T>(base, first)       // an octet per lane of a warp, of 32 that begin at `first`
//   WholeSectors::load<T>(base, first)       // the same, for memory of the host
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

namespace detail {
// nvcc 13.0 splits a store of 16 bytes into four after shuffles.
__device__ __forceinline__ void store_16_bytes(void* address, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(address)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
}  // namespace detail

// Stores an octet at an address in global memory that is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void store_whole(T* address, const Words<T>& words) {
    constexpr int parts = sizeof(words.word) / 16;
#pragma unroll
    for (int i = 0; i < parts; ++i) {
        const uint32_t* word = words.word + 4 * i;
        detail::store_16_bytes(address + 16 / sizeof(T) * i, make_uint4(word[0], word[1], word[2], word[3]));
    }
}

// 32 consecutive octets of a warp, one per lane, which begin at `first`. Called by whole warps; base + first is aligned to 16
// bytes. Each lane loads and stores its own octet.
struct OctetPerLane {
    // Which of the octets this lane has.
    static __device__ __forceinline__ int index() { return threadIdx.x % 32; }

    template <class T>
    static __device__ __forceinline__ Words<T> load(const void* base, int64_t first) {
        return Words<T>::load(base, first + index() * octet);
    }
    template <class T>
    static __device__ __forceinline__ void store(void* base, int64_t first, const Words<T>& words) {
        words.store(base, first + index() * octet);
    }
};

// The same for memory of the host. An octet of floats has 32 bytes, so if each lane loaded its own, every access would touch
// half of each sector: caches make up for it, but the link is then used four times as long. So lanes access what lies
// together, and exchange halves with their neighbours, for 4 shuffles and 16 selections a tensor.
struct WholeSectors {
    static __device__ __forceinline__ int index() { return threadIdx.x % 32 / 2 + threadIdx.x % 2 * 16; }

    template <class T>
    static __device__ __forceinline__ Words<T> load(const void* base, int64_t first) {
        if constexpr (sizeof(T) == 2) {
            return Words<T>::load(base, first + index() * octet);
        } else {
            const uint4* address = reinterpret_cast<const uint4*>(static_cast<const float*>(base) + first) + threadIdx.x % 32;
            __builtin_assume(__isGlobal(address));
            uint4 low = address[0], high = address[32];
            exchange(low, high);
            return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
        }
    }

    template <class T>
    static __device__ __forceinline__ void store(void* base, int64_t first, const Words<T>& words) {
        if constexpr (sizeof(T) == 2) {
            words.store(base, first + index() * octet);
        } else {
            uint4 low = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
            uint4 high = make_uint4(words.word[4], words.word[5], words.word[6], words.word[7]);
            exchange(low, high);
            uint4* address = reinterpret_cast<uint4*>(static_cast<float*>(base) + first) + threadIdx.x % 32;
            detail::store_16_bytes(address, low);
            detail::store_16_bytes(address + 32, high);
        }
    }

private:
    // An even lane gives `second` for the `first` of the odd lane after it.
    static __device__ __forceinline__ void exchange(uint4& first, uint4& second) {
        const bool odd = threadIdx.x % 2 != 0;
        uint4 given = odd ? first : second;
        given.x = __shfl_xor_sync(0xffffffffu, given.x, 1);
        given.y = __shfl_xor_sync(0xffffffffu, given.y, 1);
        given.z = __shfl_xor_sync(0xffffffffu, given.z, 1);
        given.w = __shfl_xor_sync(0xffffffffu, given.w, 1);
        (odd ? first : second) = given;
    }
};

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
