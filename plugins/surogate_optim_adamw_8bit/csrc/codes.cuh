// 8-bit moments: eight consecutive codes a thread, so that a block of 256 with one scale is a warp.
//
//   const TableAddresses tables(address);           // CodeTables in shared memory
//   tables.decode_m(codes, scale, x)                // x[i] = map[code i] * scale; decode_v likewise
//   const Magnitudes<true> magnitudes(x);           // of numbers with signs
//   scale = magnitudes.scale();                     // the largest of the warp
//   const Quotients quotients(magnitudes, scale);
//   quotients.in_range()                            // of this thread; all threads of the warp must be asked
//   encode(tables, magnitudes, quotients)           // the codes nearest to x / scale, as in `codes.py`
//   encode_any(tables, magnitudes, scale)           // the same for any x and scale
//
// Quotients are scaled by 2^31. `Quotients` divides by multiplication with the rounded reciprocal and one correction. That
// is not always x / scale as IEEE 754 rounds it, but on the same side of every threshold between two codes:
// tests/test_codes.py verifies all x and scale whose quotient is close enough to such a place for an error to matter.
// `encode_any` uses the division of the compiler.
//
// 32 threads that look up 32 codes in one table meet in the same bank of shared memory, so each lane has its own copy of
// the maps, in its own bank. `__dp4a` and `__dp2a_lo` select a byte or half of a word, multiply it by the size of an entry
// and add the address of the table in one instruction, which is not one of the ALU.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "element.cuh"
#include "surogate/octet.cuh"

namespace surogate {

constexpr int code_block = 32 * octet;
constexpr int map_size = 256;
constexpr int replicas = 32;
constexpr uint32_t zero_code = 127;  // of the signed map

// The lookups of `codes.py`: their keys are the upper halves of floats from 2 to 2^31.
constexpr int lookup_exponent = 31;
constexpr int lookup_size = 3841;
constexpr uint32_t first_key = 0x4000;

// As `kernels.code_words` writes them.
constexpr int code_table_words = 2 * map_size + 2 * lookup_size;

struct CodeTables {
    float m[map_size * replicas];
    float v[map_size * replicas];
    uint32_t m_entries[lookup_size];
    uint32_t v_entries[lookup_size];
};

// Fills the tables with all threads of the block. The caller synchronizes.
__device__ __forceinline__ void load_tables(CodeTables& tables, const uint32_t* words) {
    for (int i = threadIdx.x; i < map_size * replicas; i += blockDim.x) {
        tables.m[i] = __uint_as_float(words[i / replicas]);
        tables.v[i] = __uint_as_float(words[map_size + i / replicas]);
    }
    for (int i = threadIdx.x; i < 2 * lookup_size; i += blockDim.x) {
        tables.m_entries[i] = words[2 * map_size + i];  // v_entries follows
    }
}
static_assert(offsetof(CodeTables, v_entries) == offsetof(CodeTables, m_entries) + sizeof(CodeTables::m_entries));

namespace detail {
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

// Returns the larger number, NaN if one is NaN.
__device__ __forceinline__ float larger(float x, float y) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

// Loads the word at `address + offset` of the tables in shared memory.
template <int Offset>
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
    uint32_t word;
    asm("ld.shared.b32 %0, [%1 + %2];" : "=r"(word) : "r"(address), "n"(Offset));
    return word;
}

// Returns four codes of the signed map: their distances from the code of 0, in the direction of the sign. The code of 1
// is one further from 0 than that of any negative number.
__device__ __forceinline__ uint32_t with_signs(uint32_t distances, uint32_t negative) {
    constexpr uint32_t zeros = zero_code * 0x01010101u;
    const uint32_t positives = distances + zeros;
    const uint32_t nearer = distances - (distances >> 7 & 0x01010101u);
    return (negative & (nearer ^ zeros)) | (~negative & positives);
}

// Returns the high bytes of four words.
__device__ __forceinline__ uint32_t high_bytes(const uint32_t* words) {
    return permute(permute(words[0], words[1], 0x73), permute(words[2], words[3], 0x73), 0x5410);
}
}  // namespace detail

// The addresses of `CodeTables` in shared memory that a thread uses.
class TableAddresses {
public:
    __device__ __forceinline__ explicit TableAddresses(const CodeTables& tables)
        : maps_(static_cast<uint32_t>(__cvta_generic_to_shared(&tables)) + threadIdx.x % replicas * sizeof(float)),
          keys_(static_cast<uint32_t>(__cvta_generic_to_shared(&tables)) - first_key * sizeof(uint32_t)) {}

    __device__ __forceinline__ void decode_m(uint2 codes, float scale, float (&x)[octet]) const {
        decode<offsetof(CodeTables, m)>(codes, scale, x);
    }
    __device__ __forceinline__ void decode_v(uint2 codes, float scale, float (&x)[octet]) const {
        decode<offsetof(CodeTables, v)>(codes, scale, x);
    }

    // Returns a word whose high byte is the code of a quotient that is not 0.
    template <bool Signed>
    __device__ __forceinline__ uint32_t find(float quotient) const {
        constexpr int entries = Signed ? offsetof(CodeTables, m_entries) : offsetof(CodeTables, v_entries);
        const uint32_t bits = __float_as_uint(quotient);
        return detail::load_shared<entries>(__dp2a_lo(bits, sizeof(uint32_t) << 8, keys_)) + bits;
    }

private:
    template <int Map>
    __device__ __forceinline__ void decode(uint2 codes, float scale, float (&x)[octet]) const {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            constexpr uint32_t step = replicas * sizeof(float);
            const uint32_t address = __dp4a(i < 4 ? codes.x : codes.y, step << (8 * (i % 4)), maps_);
            x[i] = __fmul_rn(__uint_as_float(detail::load_shared<Map>(address)), scale);
        }
    }

    uint32_t maps_, keys_;
};

// The magnitudes of eight numbers.
template <bool Signed>
struct Magnitudes {
    float x[octet];
    uint2 negative = make_uint2(0, 0);  // 0xff in the bytes of negative numbers

    // Numbers that are not `Signed` are not negative.
    __device__ __forceinline__ explicit Magnitudes(const float (&numbers)[octet]) {
        if (Signed) {
            negative = make_uint2(signs(numbers), signs(numbers + 4));
        }
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = Signed ? fabsf(numbers[i]) : numbers[i];
        }
    }

    // Returns the largest magnitude over the warp, NaN if one is NaN: its bits are above those of infinity.
    __device__ __forceinline__ float scale() const {
        float top = x[0];
#pragma unroll
        for (int i = 1; i < octet; ++i) {
            top = Signed ? detail::larger(top, x[i]) : __uint_as_float(max(__float_as_uint(top), __float_as_uint(x[i])));
        }
        return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(top)));
    }

private:
    static __device__ __forceinline__ uint32_t signs(const float* numbers) {
        const uint32_t low = detail::permute(__float_as_uint(numbers[0]), __float_as_uint(numbers[1]), 0xfb);
        const uint32_t high = detail::permute(__float_as_uint(numbers[2]), __float_as_uint(numbers[3]), 0xfb);
        return detail::permute(low, high, 0x5410);
    }
};

// Eight magnitudes divided by a scale in [2^-60, 2^126] that is not below any of them, times 2^31.
struct Quotients {
    float x[octet];

    template <bool Signed>
    __device__ __forceinline__ Quotients(const Magnitudes<Signed>& magnitudes, float scale) {
        scale = __fmul_rn(scale, 0x1p-31f);
        float reciprocal = approximate_reciprocal(scale);
        reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-scale, reciprocal, 1.0f), reciprocal);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            const float quotient = __fmul_rn(magnitudes.x[i], reciprocal);
            x[i] = __fmaf_rn(__fmaf_rn(-scale, quotient, magnitudes.x[i]), reciprocal, quotient);
        }
    }

    // Whether all are at least 2, where the lookups begin.
    __device__ __forceinline__ bool in_range() const {
        uint32_t common = ~0u;
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            common &= __float_as_uint(x[i]);
        }
        return common & 0x40000000u;
    }
};
static_assert(lookup_exponent == 31 && first_key << 16 == 0x40000000);

template <bool Signed>
__device__ __forceinline__ uint2 packed(const uint32_t (&found)[octet], const Magnitudes<Signed>& magnitudes) {
    const uint2 codes = make_uint2(detail::high_bytes(found), detail::high_bytes(found + 4));
    return Signed ? make_uint2(detail::with_signs(codes.x, magnitudes.negative.x),
                               detail::with_signs(codes.y, magnitudes.negative.y))
                  : codes;
}

template <bool Signed>
__device__ __forceinline__ uint2 encode(const TableAddresses& tables, const Magnitudes<Signed>& magnitudes,
                                        const Quotients& quotients) {
    uint32_t found[octet];
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        found[i] = tables.find<Signed>(quotients.x[i]);
    }
    return packed(found, magnitudes);
}

// For the largest magnitude of the warp as the scale. A NaN gets the code of 0, and so does its block but for signs.
template <bool Signed>
__device__ __forceinline__ uint2 encode_any(const TableAddresses& tables, const Magnitudes<Signed>& magnitudes,
                                            float scale) {
    uint32_t found[octet];
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        const float x = magnitudes.x[i], quotient = __fmul_rn(__fdiv_rn(x, scale), 0x1p31f);
        found[i] = x > 0.0f ? tables.find<Signed>(fmaxf(quotient, 2.0f)) : 0;  // fmaxf returns 2 for a NaN
    }
    return packed(found, magnitudes);
}

}  // namespace surogate
