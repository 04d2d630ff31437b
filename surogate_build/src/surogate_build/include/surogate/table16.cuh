// Decodes 4-bit codes by a table of 16 floats that is distributed over the lanes of a warp, so that a lookup is a shuffle.
//
//   const Table16 table(levels);                           // levels: 16 floats; every lane takes one
//   table.decode<HighFirst>(word, x);                      // eight codes to floats
//   decode_chunk<HighFirst>(table, codes, out, count, scale);
//
// HighFirst: the first element of a byte is its upper half. Every lane of the warp must call these functions.
//
// Per code a shift and a shuffle. A table in shared memory takes as many instructions, and must be written first.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "surogate/reduce.cuh"
#include "surogate/words.cuh"

namespace surogate {

class Table16 {
public:
    __device__ __forceinline__ explicit Table16(const float* levels) : level_(levels[threadIdx.x % 16]) {}

    // Decodes the codes of four bytes, the lowest byte first.
    template <bool HighFirst>
    __device__ __forceinline__ void decode(uint32_t word, float (&x)[octet]) const {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = at(word >> 4 * (HighFirst ? i ^ 1 : i));
        }
    }

private:
    // A shuffle uses the lower five bits of the lane. The fifth may be any, because lane i + 16 has the level of lane i.
    __device__ __forceinline__ float at(uint32_t code) const {
        return __shfl_sync(full_warp, level_, static_cast<int>(code));
    }

    float level_;
};

constexpr int decode_threads = 256;
constexpr int decode_unroll = 4;
constexpr int chunk_octets = decode_threads * decode_unroll;

namespace detail {
template <bool HighFirst, bool Whole, class T, class Scale>
__device__ __forceinline__ void decode_octets(const Table16& table, const uint32_t* __restrict__ codes,
                                              T* __restrict__ out, int count, const Scale& scale) {
    uint32_t words[decode_unroll];
    typename Scale::Loaded loaded[decode_unroll];
    const uint32_t* own = codes + threadIdx.x;
    T* to = out + threadIdx.x * octet;
    const auto existing = [&](int u) {
        const uint32_t i = u * decode_threads + threadIdx.x;
        return Whole ? i : min(i, static_cast<uint32_t>(count) - 1);
    };
#pragma unroll
    for (int u = 0; u < decode_unroll; ++u) {
        // Read once per pass: the cache is for `out`, which products read next.
        words[u] = __ldcs(Whole ? own + u * decode_threads : codes + existing(u));
    }
    // These barriers cost nothing and keep the order of loads. Without the first, loads of codes wait for those of scales
    // that take two steps; without the second, the assembler saves registers by loading half after it has decoded half.
    __syncwarp();
#pragma unroll
    for (int u = 0; u < decode_unroll; ++u) {
        loaded[u] = scale.load(existing(u));
    }
    __syncwarp();
#pragma unroll
    for (int u = 0; u < decode_unroll; ++u) {
        const int i = u * decode_threads + static_cast<int>(threadIdx.x);
        float x[octet];
        table.decode<HighFirst>(words[u], x);
        scale.apply(loaded[u], x);
        if (Whole || i < count) {
            store_whole(to + u * decode_threads * octet, Words<T>::nearest(x));
        }
    }
}
}  // namespace detail

// Decodes, scales and stores the first `count` of up to `chunk_octets` octets with all `decode_threads` threads of a
// block. `out` is aligned to 16 bytes. A Scale has
//
//   Loaded                                   what `load` returns
//   Loaded load(uint32_t i) const            loads the scale of octet i of the chunk by `__ldca`: see `decode_octets`
//   void apply(Loaded, float (&x)[8]) const  scales the levels of an octet
template <bool HighFirst, class T, class Scale>
__device__ __forceinline__ void decode_chunk(const Table16& table, const uint32_t* codes, T* out, int64_t count,
                                             const Scale& scale) {
    if (count >= chunk_octets) {
        detail::decode_octets<HighFirst, true>(table, codes, out, chunk_octets, scale);
    } else {
        detail::decode_octets<HighFirst, false>(table, codes, out, static_cast<int>(count), scale);
    }
}

}  // namespace surogate
