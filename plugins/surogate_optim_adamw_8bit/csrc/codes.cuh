// 8-bit moments: eight consecutive codes a thread, so that a block of 256 with one scale is a warp.
//
//   decode(tables.m, codes, scale, x)             // x[i] = map[code i] * scale
//   const Magnitudes<true> magnitudes(x);         // of numbers with signs
//   scale = magnitudes.scale();                   // the largest of the warp
//   encode(tables.m_entries, magnitudes, scale)   // the codes nearest to x / scale, as in `codes.py`
//   encode_any(...)                               // the same for any x and scale
//
// x / scale is rounded as IEEE 754 requires. `encode` divides by multiplication with the reciprocal, given as the sum of
// two floats, which yields a float next to the quotient, and one correction by the rounded reciprocal (Markstein 1990).
// That is exact where the quotient is at least 2^-23 and the scale within [2^-80, 2^80]. Smaller quotients need no exact
// value: they are below the second code. `encode_any` uses the division of the compiler.
//
// Maps are copied to shared memory `replicas` times, because 32 threads that look up 32 codes meet in the same bank:
// thread i reads copy i % 8 and shares its banks with three others. The nearest code takes one access more (`Lookup` in
// codes.py): an entry by the leading bits of the quotient, whose carry adds one above the threshold.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "element.cuh"
#include "surogate/octet.cuh"

namespace surogate {

constexpr int code_block = 32 * octet;
constexpr int map_size = 256;
constexpr int replicas = 8;
constexpr uint32_t zero_code = 127;  // of the signed map

template <bool Signed>
struct LookupShape;
template <>
struct LookupShape<true> {
    static constexpr int shift = 17;
    static constexpr uint32_t first = 6910;
    static constexpr int size = 1219;
};
template <>
struct LookupShape<false> {
    static constexpr int shift = 16;
    static constexpr uint32_t first = 13586;
    static constexpr int size = 2671;
};

// As `kernels.code_words` writes them.
constexpr int code_table_words = 2 * map_size + LookupShape<true>::size + LookupShape<false>::size;

struct CodeTables {
    float m[map_size * replicas];
    float v[map_size * replicas];
    uint32_t m_entries[LookupShape<true>::size];
    uint32_t v_entries[LookupShape<false>::size];
};

// Fills the tables with all threads of the block. The caller synchronizes.
__device__ __forceinline__ void load_tables(CodeTables& tables, const uint32_t* words) {
    for (int i = threadIdx.x; i < map_size * replicas; i += blockDim.x) {
        tables.m[i] = __uint_as_float(words[i / replicas]);
        tables.v[i] = __uint_as_float(words[map_size + i / replicas]);
    }
    for (int i = threadIdx.x; i < LookupShape<true>::size + LookupShape<false>::size; i += blockDim.x) {
        tables.m_entries[i] = words[2 * map_size + i];  // v_entries follows
    }
}
static_assert(offsetof(CodeTables, v_entries) == offsetof(CodeTables, m_entries) + sizeof(CodeTables::m_entries));

__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

__device__ __forceinline__ void decode(const float* map, uint2 codes, float scale, float (&x)[octet]) {
    constexpr int code_shift = 5;  // from a code to its offset in bytes
    static_assert(1 << code_shift == replicas * sizeof(float));
    const uint32_t copy = threadIdx.x % replicas * sizeof(float);
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        const uint32_t word = i < 4 ? codes.x : codes.y;
        const int shift = 8 * (i % 4) - code_shift;
        const uint32_t code = (shift < 0 ? word << -shift : word >> shift) & (map_size - 1) << code_shift;
        x[i] = __fmul_rn(*reinterpret_cast<const float*>(reinterpret_cast<const char*>(map) + (code | copy)), scale);
    }
}

// Eight numbers as magnitudes, with what the search of their codes needs.
template <bool Signed>
struct Magnitudes {
    float x[octet];
    uint2 negative = make_uint2(0, 0);  // 0xff in the bytes of negative numbers
    uint32_t top = 0;                   // bits of the largest: those of a NaN are above those of infinity
    uint32_t bottom = ~0u;              // bits of the smallest

    // Numbers that are not `Signed` are not negative.
    __device__ __forceinline__ explicit Magnitudes(const float (&numbers)[octet]) {
        if (Signed) {
            negative = make_uint2(signs(numbers), signs(numbers + 4));
        }
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            const uint32_t bits = __float_as_uint(numbers[i]) & (Signed ? 0x7fffffffu : ~0u);
            x[i] = __uint_as_float(bits);
            top = max(top, bits);
            bottom = min(bottom, bits);
        }
    }

    // Returns the largest magnitude over the warp, NaN if one is NaN.
    __device__ __forceinline__ float scale() const { return __uint_as_float(__reduce_max_sync(0xffffffffu, top)); }

private:
    static __device__ __forceinline__ uint32_t signs(const float* numbers) {
        const uint32_t low = permute(__float_as_uint(numbers[0]), __float_as_uint(numbers[1]), 0xfb);
        const uint32_t high = permute(__float_as_uint(numbers[2]), __float_as_uint(numbers[3]), 0xfb);
        return permute(low, high, 0x5410);
    }
};

// Whether `encode` may be used.
__device__ __forceinline__ bool encodes(float scale) { return scale == 0.0f || (scale >= 0x1p-80f && scale <= 0x1p80f); }

namespace detail {
// Returns the high bytes of four words.
__device__ __forceinline__ uint32_t high_bytes(const uint32_t* words) {
    return permute(permute(words[0], words[1], 0x73), permute(words[2], words[3], 0x73), 0x5410);
}

// Returns four codes of the signed map: their distances from the code of 0, in the direction of the sign. The code of 1
// is one further from 0 than that of any negative number.
__device__ __forceinline__ uint32_t with_signs(uint32_t distances, uint32_t negative) {
    constexpr uint32_t zeros = zero_code * 0x01010101u;
    const uint32_t positives = distances + zeros;
    const uint32_t nearer = distances - (distances >> 7 & 0x01010101u);
    return (negative & (nearer ^ zeros)) | (~negative & positives);
}

// Returns a word whose high byte is the code of a quotient that is not 0.
template <bool Signed>
__device__ __forceinline__ uint32_t code_of(const uint32_t* entries, float quotient) {
    using Shape = LookupShape<Signed>;
    const uint32_t bits = __float_as_uint(quotient);
    const uint32_t key = max(bits >> Shape::shift, Shape::first) - Shape::first;
    return entries[key] + (bits & ((1u << Shape::shift) - 1));
}

template <bool Signed>
__device__ __forceinline__ uint2 finish(uint32_t (&found)[octet], const Magnitudes<Signed>& magnitudes) {
    if (magnitudes.bottom == 0) {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            found[i] = magnitudes.x[i] == 0.0f ? 0 : found[i];
        }
    }
    uint2 codes = make_uint2(high_bytes(found), high_bytes(found + 4));
    if (Signed) {
        codes = make_uint2(with_signs(codes.x, magnitudes.negative.x), with_signs(codes.y, magnitudes.negative.y));
    }
    return codes;
}
}  // namespace detail

// For a scale for which `encodes` is true, and which is not below any of the magnitudes.
template <bool Signed>
__device__ __forceinline__ uint2 encode(const uint32_t* entries, const Magnitudes<Signed>& magnitudes, float scale) {
    float reciprocal = approximate_reciprocal(scale);
    reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-scale, reciprocal, 1.0f), reciprocal);
    reciprocal = scale == 0.0f ? 0.0f : reciprocal;
    const float rest = __fmul_rn(__fmaf_rn(-scale, reciprocal, 1.0f), reciprocal);
    uint32_t found[octet];
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        const float x = magnitudes.x[i];
        float quotient = __fmaf_rn(x, reciprocal, __fmul_rn(x, rest));
        quotient = __fmaf_rn(__fmaf_rn(-scale, quotient, x), reciprocal, quotient);
        found[i] = detail::code_of<Signed>(entries, quotient);
    }
    return detail::finish(found, magnitudes);
}

// For the largest magnitude of the warp as the scale. A NaN gets the code of 0, and so does its block but for signs.
template <bool Signed>
__device__ __forceinline__ uint2 encode_any(const uint32_t* entries, Magnitudes<Signed> magnitudes, float scale) {
    uint32_t found[octet];
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        const float quotient = __fdiv_rn(magnitudes.x[i], scale);
        found[i] = detail::code_of<Signed>(entries, isnan(quotient) ? 0.0f : fabsf(quotient));
        if (isnan(magnitudes.x[i])) {
            magnitudes.x[i] = 0.0f;
        }
    }
    magnitudes.bottom = 0;
    return detail::finish(found, magnitudes);
}

}  // namespace surogate
