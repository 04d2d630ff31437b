// Loads and stores of eight consecutive elements as floats. Eight elements use one Philox call, and are whole 16-byte
// words in fp32 and bf16.
//
//   float x[8];
//   load_octet(in + i, x, count, whole);    // whole: all eight elements exist and in + i is aligned to 16 bytes
//   ...                                     // otherwise the first `count` are loaded one by one and the rest are 0
//   store_octet(out + i, x, count, whole);
#pragma once

#include "surogate/vec.cuh"

namespace surogate {

constexpr int octet = 8;

template <class T>
__device__ __forceinline__ void load_octet(const T* address, float (&x)[octet]) {
    using V = Vec<T>;
#pragma unroll
    for (int part = 0; part < octet / V::size; ++part) {
        const V v = V::load(address + part * V::size);
#pragma unroll
        for (int i = 0; i < V::size; ++i) {
            x[part * V::size + i] = to_float(v[i]);
        }
    }
}

template <class T>
__device__ __forceinline__ void store_octet(T* address, const float (&x)[octet]) {
    using V = Vec<T>;
#pragma unroll
    for (int part = 0; part < octet / V::size; ++part) {
        V v;
#pragma unroll
        for (int i = 0; i < V::size; ++i) {
            v[i] = from_float<T>(x[part * V::size + i]);
        }
        v.store(address + part * V::size);
    }
}

template <class T>
__device__ __forceinline__ void load_octet(const T* address, float (&x)[octet], int64_t count, bool whole) {
    if (whole) {
        load_octet(address, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        x[i] = i < count ? to_float(address[i]) : 0.0f;
    }
}

template <class T>
__device__ __forceinline__ void store_octet(T* address, const float (&x)[octet], int64_t count, bool whole) {
    if (whole) {
        store_octet(address, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        if (i < count) {
            address[i] = from_float<T>(x[i]);
        }
    }
}

}  // namespace surogate
