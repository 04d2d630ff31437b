// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and stochastic rounding to bf16.
// Bit-identical to `surogate_core.reference.rounding`. For host and device code.
//
// Element i of a value uses half i % 2 (low first) of word (i % 8) / 2 of
//   philox4x32_10({block low, block high, stream, step}, {seed low, seed high}),  block = i / 8,
// so one call yields the bits of eight elements. Test vector: a counter and key of zeros give
// 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace surogate {

struct PhiloxWords {
    uint32_t word[4];

    // Returns the 16 random bits of an element, 0 to 7.
    __host__ __device__ __forceinline__ uint16_t half(int element) const {
        return static_cast<uint16_t>(word[element / 2] >> (16 * (element % 2)));
    }
};

// The keys of the ten rounds.
struct PhiloxKeys {
    uint32_t low[10], high[10];
};

__host__ __device__ __forceinline__ PhiloxKeys philox_keys(int64_t seed) {
    PhiloxKeys keys;
    keys.low[0] = static_cast<uint32_t>(seed);
    keys.high[0] = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 1; round < 10; ++round) {
        keys.low[round] = keys.low[round - 1] + 0x9E3779B9u;
        keys.high[round] = keys.high[round - 1] + 0xBB67AE85u;
    }
    return keys;
}

// Calls with the same c0 and c1 share the first product of round 1 and the second of round 2, which depend on no other
// word. If these and the other two products of the rounds are the same in all iterations of a loop, the compiler moves
// them out of it.
__host__ __device__ __forceinline__ PhiloxWords philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                                              const PhiloxKeys& keys) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u;
        const uint64_t p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ keys.low[round];
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ keys.high[round];
        c3 = static_cast<uint32_t>(p0);
    }
    return {{c0, c1, c2, c3}};
}

// Returns the random bits of elements 8 * block to 8 * block + 7 of a value.
__host__ __device__ __forceinline__ PhiloxWords random_halves(int64_t block, int64_t seed, int64_t stream,
                                                              int64_t step) {
    return philox4x32_10(static_cast<uint32_t>(block), static_cast<uint32_t>(static_cast<uint64_t>(block) >> 32),
                         static_cast<uint32_t>(stream), static_cast<uint32_t>(step), philox_keys(seed));
}

// Returns the 16 random bits of one element, for scalar code paths.
__host__ __device__ __forceinline__ uint16_t random_half(int64_t element, int64_t seed, int64_t stream, int64_t step) {
    return random_halves(element / 8, seed, stream, step).half(static_cast<int>(element % 8));
}

// Rounds stochastically, so that the expected value of the result is x: (bit pattern of x + random) >> 16. Infinities
// and NaN are cast. The largest finite values may round to infinity.
__host__ __device__ __forceinline__ __nv_bfloat16 stochastic_round_bf16(float x, uint16_t random) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        return __float2bfloat16_rn(x);
    }
    __nv_bfloat16_raw raw;
    raw.x = static_cast<unsigned short>((bits + random) >> 16);
    return __nv_bfloat16(raw);
}

}  // namespace surogate
