// NVFP4 in registers: blocks of 16 bf16, their scales and codes. Bit-identical to `surogate_recipes_nvfp4.reference`.
//
//   range   6 * 448, or 6 * 256 with FourOverSix
//   encode  min(range / amax, FLT_MAX), 1 if amax is 0;  decode = 1 / encode
//   scale   E4M3(top * (encode * (1 / 6))), where top is the largest magnitude of the block
//   code    E2M1(clamp(x * min(1 / (scale * decode), FLT_MAX)))
//
// Every operation is rounded to fp32 by itself. The intrinsics with a rounding mode say so, which the compiler never
// contracts to fused multiply-adds; those that are meant are written __fmaf_rn and __fmaf_rz, and their products are exact.
#pragma once

#include <surogate/philox.cuh>
#include <surogate/small_floats.cuh>

#include <cfloat>

namespace surogate {

constexpr int fp4_block = 16;

// Sixteen bf16, in order.
struct Fp4Elements {
    alignas(16) uint32_t pair[8];

    __device__ __forceinline__ float get(int i) const {
        return __uint_as_float(i % 2 ? pair[i / 2] & 0xffff0000u : pair[i / 2] << 16);
    }

    // Returns the largest magnitude.
    __device__ __forceinline__ float top() const {
        uint32_t top = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            top = __vmaxs2(top, pair[k] & 0x7fff7fffu);
        }
        return __uint_as_float(max(top & 0xffff0000u, top << 16));
    }
};

// What the blocks of a matrix share.
template <bool FourOverSix>
struct Fp4Matrix {
    static constexpr float range = FourOverSix ? 1536.0f : 2688.0f;

    float amax, encode, decode, sixth;

    __device__ __forceinline__ explicit Fp4Matrix(float amax) : amax(amax) {
        encode = amax > 0.0f ? fminf(__fdiv_rn(range, amax), FLT_MAX) : 1.0f;
        decode = __fdiv_rn(1.0f, encode);
        sixth = __fmul_rn(encode, 1.0f / 6.0f);
    }
};

// A scale in E4M3, and what elements are multiplied with to be in units of it.
struct Fp4Scale {
    uint32_t code;
    float factor;

    template <bool FourOverSix>
    __device__ __forceinline__ static Fp4Scale of(float scale, const Fp4Matrix<FourOverSix>& matrix) {
        const uint32_t code = e4m3_of(scale);
        const float step = __fmul_rn(float_of_ue4m3(code), matrix.decode);
        return {code, fminf(__fdiv_rn(1.0f, step), FLT_MAX)};
    }
};

// v / 1536, for magnitudes whose quotient and remainder are normal numbers: the quotient by 3, corrected by its exact
// remainder, is rounded correctly, for every mantissa (tests/test_reference.py).
__device__ __forceinline__ float over_1536(float v) {
    constexpr float third = 1.0f / 3.0f;
    const float quotient = __fmul_rn(v, third);
    const float remainder = __fmaf_rn(-3.0f, quotient, v);
    return __fmul_rn(__fmaf_rn(remainder, third, quotient), 0x1p-9f);
}

// Returns the squared error of a block that is rounded to nearest with this scale: the sum in order of
// (level * scale * amax / 1536 - x)^2. Magnitudes have the same error.
template <bool Ordinary>
__device__ __forceinline__ float fp4_error(const Fp4Elements& x, const Fp4Scale& scale, float amax) {
    constexpr uint32_t one = 0x3f800000u, exponent = 0x7f800000u, to_ulp = 22u << 23;
    const float step = float_of_ue4m3(scale.code);
    float error = 0.0f;
#pragma unroll
    for (int i = 0; i < fp4_block; ++i) {
        const float magnitude = fabsf(x.get(i)), y = fminf(__fmul_rn(magnitude, scale.factor), 6.0f);
        // Adding a number whose unit in the last place is the distance of levels at y rounds y to a level.
        const float rounder = __uint_as_float((max(__float_as_uint(y), one) & exponent) + to_ulp);
        const float level = __fsub_rn(__fadd_rn(y, rounder), rounder);
        const float product = __fmul_rn(__fmul_rn(level, step), amax);
        const float value = Ordinary ? over_1536(product) : __fdiv_rn(product, 1536.0f);
        const float d = __fsub_rn(value, magnitude);
        error = __fadd_rn(error, __fmul_rn(d, d));
    }
    return error;
}

// Returns the scale of a block with the largest magnitude `top`, or of a set of blocks that share one: `total` maps the
// error of a candidate to that of the whole set, calling it back for the errors of the blocks.
template <class Total>
__device__ __forceinline__ Fp4Scale fp4_scale(float top, const Fp4Matrix<false>& matrix, const Total&) {
    return Fp4Scale::of(__fmul_rn(top, matrix.sixth), matrix);
}

template <class Total>
__device__ __forceinline__ Fp4Scale fp4_scale(float top, const Fp4Matrix<true>& matrix, const Total& total) {
    const float base = __fmul_rn(__fdiv_rn(top, 6.0f), matrix.encode);
    const Fp4Scale six = Fp4Scale::of(base, matrix), four = Fp4Scale::of(__fmul_rn(base, 1.5f), matrix);
    const float amax = matrix.amax;
    const bool ordinary = amax >= 0x1p-80f && amax <= 0x1p100f;  // the same in all threads
    const auto smaller = [&](auto error) { return total(four, error) < total(six, error); };
    const bool is_four = ordinary ? smaller([=](const Fp4Elements& x, const Fp4Scale& s) { return fp4_error<true>(x, s, amax); })
                                  : smaller([=](const Fp4Elements& x, const Fp4Scale& s) { return fp4_error<false>(x, s, amax); });
    return is_four ? four : six;
}

// Codes of magnitudes are made in floats, four in one, because multiply-adds are issued twice as fast as operations on bits.
// The code of the magnitude a is the integer next to the smallest of 2a, a + 2 and a / 2 + 4. It is added, times 16^Place, to
// the number whose unit in the last place is 16^Place. Ties to even integers are ties to even codes.
template <int Place>
struct Fp4Place {
    static constexpr float unit = static_cast<float>(1 << 4 * Place), zero = unit * 0x1p23f;

    static __device__ __forceinline__ float nearest(float y) {
        const float a = fminf(y, 6.0f);
        const float low = fminf(__fmaf_rn(a, 2.0f * unit, zero), __fmaf_rn(a, unit, zero + 2.0f * unit));
        return fminf(low, __fmaf_rn(a, 0.5f * unit, zero + 4.0f * unit));
    }

    // Raises the magnitude by byte / 256 of the distance of levels there, and rounds it down to a level. Levels from 1, 2 and
    // 4 on have half of that as their distance.
    static __device__ __forceinline__ float random(float y, uint32_t word, int byte) {
        constexpr float base = 0x1p14f;  // its unit in the last place is 2^-9
        const float a = fminf(y, 6.0f);
        const float shift = __fsub_rn(__uint_as_float(__byte_perm(word, __float_as_uint(base), 0x7640u + byte)), base);
        const float power = __uint_as_float(max(__float_as_uint(a), 0x3f800000u) & 0x7f800000u);
        const float raised = __fmaf_rn(shift, power, a);
        const float low = fminf(__fmaf_rz(raised, 2.0f * unit, zero), __fmaf_rz(raised, unit, zero + 2.0f * unit));
        return fminf(low, __fmaf_rz(raised, 0.5f * unit, zero + 4.0f * unit));
    }
};

// Returns the codes of four magnitudes in the lower 16 bits. The sums are exact.
__device__ __forceinline__ uint32_t fp4_four(float first, float second, float third, float fourth) {
    const float upper = __fadd_rn(__fsub_rn(third, Fp4Place<2>::zero), __fsub_rn(fourth, Fp4Place<3>::zero));
    return __float_as_uint(__fadd_rn(__fadd_rn(first, __fsub_rn(second, Fp4Place<1>::zero)), upper));
}

// Returns eight codes, the first one in the lowest four bits: two times four magnitudes, and the signs of eight elements.
__device__ __forceinline__ uint32_t fp4_pack(uint32_t low, uint32_t high, const uint32_t* pair) {
    uint32_t half[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const uint32_t signs = __byte_perm(pair[2 * k], pair[2 * k + 1], 0x7531) & 0x80808080u;
        half[k] = signs >> 4 | signs >> 8;  // two signs in the bytes 0 and 2
    }
    return __byte_perm(low, high, 0x5410) | (__byte_perm(half[0], half[1], 0x6420) & 0x88888888u);
}

// Returns the codes of a block; with Stochastic by random bytes, byte e of the words for element e.
template <bool Stochastic>
__device__ __forceinline__ uint2 fp4_codes(const Fp4Elements& x, float factor, const PhiloxWords& random) {
    const auto number = [&](auto place, int e) {
        const float y = fabsf(__fmul_rn(x.get(e), factor));
        return Stochastic ? place.random(y, random.word[e / 4], e % 4) : place.nearest(y);
    };
    uint32_t four[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        four[k] = fp4_four(number(Fp4Place<0>{}, 4 * k), number(Fp4Place<1>{}, 4 * k + 1),
                           number(Fp4Place<2>{}, 4 * k + 2), number(Fp4Place<3>{}, 4 * k + 3));
    }
    return make_uint2(fp4_pack(four[0], four[1], x.pair), fp4_pack(four[2], four[3], x.pair + 4));
}

// Multiplies 16 numbers by signs and by the orthogonal Hadamard matrix, and rounds them to bf16: strides 1, 2, 4, 8.
__device__ __forceinline__ Fp4Elements fp4_hadamard(float (&v)[fp4_block]) {
    constexpr uint32_t negative = 0xd7e8u;
#pragma unroll
    for (int i = 0; i < fp4_block; ++i) {
        v[i] = negative >> i & 1u ? -v[i] : v[i];
    }
#pragma unroll
    for (int stride = 1; stride < fp4_block; stride *= 2) {
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            if ((i & stride) == 0) {
                const float low = v[i], high = v[i + stride];
                v[i] = __fadd_rn(low, high);
                v[i + stride] = __fsub_rn(low, high);
            }
        }
    }
    Fp4Elements y;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmul_rn(v[2 * k], 0.25f), __fmul_rn(v[2 * k + 1], 0.25f));
        memcpy(&y.pair[k], &pair, sizeof(pair));
    }
    return y;
}

// Two columns of 16 rows, from a word of each row.
template <bool Hadamard>
__device__ __forceinline__ void fp4_columns(const uint32_t (&words)[fp4_block], Fp4Elements (&columns)[2]) {
    if constexpr (Hadamard) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float v[fp4_block];
#pragma unroll
            for (int i = 0; i < fp4_block; ++i) {
                v[i] = __uint_as_float(half ? words[i] & 0xffff0000u : words[i] << 16);
            }
            columns[half] = fp4_hadamard(v);
        }
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            columns[0].pair[k] = __byte_perm(words[2 * k], words[2 * k + 1], 0x5410);
            columns[1].pair[k] = __byte_perm(words[2 * k], words[2 * k + 1], 0x7632);
        }
    }
}

}  // namespace surogate
