// Updates of whole octets of a chunk, whose values are in the usual range and whose buffers are aligned to 16 bytes.
//
//   const uint32_t left = update_whole<Octets, G, P>(f, tables, chunk, largest);    // moments as codes
//   const uint32_t left = update_whole<Octets, G, P>(f, chunk, largest);            // fp32 moments
//
// Octets: OctetPerLane or WholeSectors (words.cuh). G, P: float or __nv_bfloat16, of gradients and masters. Called by whole
// warps, which update 256 elements at a time: a block of codes, or as many with fp32 moments. Bit i of `left` is set if the
// i-th block was not updated, because it is not whole or an element is not in range.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "chunk.cuh"
#include "codes.cuh"
#include "element.cuh"
#include "surogate/param_table.cuh"
#include "surogate/philox.cuh"
#include "surogate/words.cuh"

namespace surogate {
namespace detail {

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

__device__ __forceinline__ uint2 load_codes(const void* codes, uint32_t first) {
    __builtin_assume(__isGlobal(codes));
    return *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(codes) + first);
}

__device__ __forceinline__ void store_codes(void* codes, uint32_t first, uint2 x) {
    __builtin_assume(__isGlobal(codes));
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(codes) + first) = x;
}

// The scales of a chunk, first the old and then the new ones: lane i has those of the i-th block. All are loaded at once,
// before any is needed. A load for each block would be waited for each time, because a prefetch of elements does not reach
// their scales.
class Scales {
public:
    __device__ __forceinline__ explicit Scales(const Chunk& chunk) : any_(lane() * code_block < chunk.size) {
        const Entry& entry = chunk.entry;
        __builtin_assume(__isGlobal(entry.m_scales) && __isGlobal(entry.v_scales));
        m_ = any_ ? entry.m_scales[lane()] : 0.0f;
        v_ = any_ ? entry.v_scales[lane()] : 0.0f;
    }
    __device__ __forceinline__ float m(int block) const { return __shfl_sync(0xffffffffu, m_, block); }
    __device__ __forceinline__ float v(int block) const { return __shfl_sync(0xffffffffu, v_, block); }
    __device__ __forceinline__ void set(int block, float m, float v) {
        const bool mine = lane() == block;
        m_ = mine ? m : m_;
        v_ = mine ? v : v_;
    }
    // Stores all but those of the blocks whose bit is set in `left`.
    __device__ __forceinline__ void store(const Chunk& chunk, uint32_t left) const {
        if (any_ && !(left >> lane() & 1)) {
            chunk.entry.m_scales[lane()] = m_;
            chunk.entry.v_scales[lane()] = v_;
        }
    }

private:
    bool any_;
    float m_, v_;
};

// Whether an element is NaN, or infinities of both signs are among the elements. `Words::rounded` would add random bits
// to a NaN. In fp32 nothing is rounded.
__device__ __forceinline__ bool has_nan(const Words<float>&) { return false; }
__device__ __forceinline__ bool has_nan(const Words<__nv_bfloat16>& x) {
    __nv_bfloat162 pairs[octet / 2];
    memcpy(pairs, x.word, sizeof(pairs));
    const __nv_bfloat162 sum = __hadd2(__hadd2(pairs[0], pairs[1]), __hadd2(pairs[2], pairs[3]));
    return !__hbeq2(sum, sum);
}

// Brings a line into the L2 cache, for a later load. A register is not needed until then.
__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(address));
}

// Whether x is in [from, to], which are positive. False for NaN.
__device__ __forceinline__ bool between(float x, float from, float to) {
    return __float_as_uint(x) - __float_as_uint(from) <= __float_as_uint(to) - __float_as_uint(from);
}

// Stores the masters and the work copies of the block at `first`, an octet per lane, and adds the param to `largest`.
template <class Octets, class P>
__device__ __forceinline__ void store_param(const Factors& f, const Chunk& chunk, uint32_t first, const float (&p)[octet],
                                            Largest& largest) {
    const Entry& entry = chunk.entry;
    // A chunk does not cross a multiple of 2^32 blocks: parts of tensors that are so large begin at multiples of 65536.
    const uint32_t low = static_cast<uint32_t>(chunk.block) + first / octet + Octets::index();
    const uint32_t high = static_cast<uint32_t>(chunk.block >> 32);
    const auto random = [&](uint32_t stream) {
        return philox4x32_10(low, high, stream, static_cast<uint32_t>(f.step), f.keys);
    };
    const Words<P> master = Words<P>::rounded(p, random, entry.stream);
    Octets::store(entry.master, first, master);
    store_copy<Octets>(entry, master, first, largest);
}

// Updates a block of codes, an octet per lane, and returns true, or writes nothing and returns false if an element is not in
// range.
template <class Octets, class G, class P>
__device__ __forceinline__ bool update_octet(const Factors& f, const TableAddresses& tables, const Chunk& chunk, int block,
                                             Scales& scales, Largest& largest) {
    const Entry& entry = chunk.entry;
    const uint32_t first = block * code_block, offset = first + Octets::index() * octet;
    const Words<G> g = Octets::template load<G>(entry.grad, first);
    const uint2 old_m = load_codes(entry.m, offset), old_v = load_codes(entry.v, offset);
    const Words<P> old_p = Octets::template load<P>(entry.master, first);
    float p[octet], m[octet], v[octet];
    tables.decode_m(old_m, __fmul_rn(scales.m(block), m_scaling), m);
    tables.decode_v(old_v, __fmul_rn(scales.v(block), v_scaling), v);
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        update_scaled_moments(f, g.get(i), m[i], v[i]);
    }
    if (first + code_block < static_cast<uint32_t>(chunk.size)) {
        const uint32_t next = offset + code_block;
        prefetch(static_cast<const char*>(entry.grad) + next * sizeof(G));
        prefetch(static_cast<const char*>(entry.master) + next * sizeof(P));
        prefetch(static_cast<const char*>(entry.m) + next);
        prefetch(static_cast<const char*>(entry.v) + next);
    }
    const Magnitudes<true> ms(m);
    const Magnitudes<false> vs(v);
    const float m_scale = ms.scale(), v_scale = vs.scale();
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        p[i] = old_p.get(i);
        update_param_in_range(f, chunk.decay, m[i], v[i], v[i], p[i]);
    }
    const Quotients m_quotients(ms, m_scale), v_quotients(vs, v_scale);
    // Then both moments are at least 2^-100: the scales are 2^-70 or more, unscaled, and the quotients 2^-30 or more.
    const bool in_range = between(m_scale, 0x1p-70f * m_scaling, 0x1p26f * m_scaling) &
                          between(v_scale, 0x1p-70f * v_scaling, 0x1p26f * v_scaling) & m_quotients.in_range() &
                          v_quotients.in_range() & !has_nan(old_p);
    if (!__all_sync(0xffffffffu, in_range)) {
        return false;
    }
    store_codes(entry.m, offset, encode(tables, ms, m_quotients));
    store_codes(entry.v, offset, encode(tables, vs, v_quotients));
    scales.set(block, __fmul_rn(m_scale, 1 / m_scaling), __fmul_rn(v_scale, 1 / v_scaling));
    store_param<Octets, P>(f, chunk, first, p, largest);
    return true;
}

// The same with fp32 moments.
template <class Octets, class G, class P>
__device__ __forceinline__ bool update_octet(const Factors& f, const Chunk& chunk, int block, Largest& largest) {
    const Entry& entry = chunk.entry;
    const uint32_t first = block * code_block;
    const Words<G> g = Octets::template load<G>(entry.grad, first);
    const Words<float> old_m = Octets::template load<float>(entry.m, first), old_v = Octets::template load<float>(entry.v, first);
    const Words<P> old_p = Octets::template load<P>(entry.master, first);
    float p[octet], m[octet], v[octet];
    bool in_range = true;
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        p[i] = old_p.get(i), m[i] = old_m.get(i), v[i] = old_v.get(i);
        update_moments(f, g.get(i), m[i], v[i]);
        const float scaled_v = __fmul_rn(v[i], v_scaling);
        update_param_in_range(f, chunk.decay, __fmul_rn(m[i], m_scaling), scaled_v, __fadd_rn(scaled_v, 0x1p-126f), p[i]);
        in_range &= fabsf(p[i]) >= 0x1p-49f;  // not NaN
    }
    if (!__all_sync(0xffffffffu, in_range)) {
        return false;
    }
    Octets::store(entry.m, first, Words<float>::nearest(m));
    Octets::store(entry.v, first, Words<float>::nearest(v));
    store_param<Octets, P>(f, chunk, first, p, largest);
    return true;
}

// Calls update(block) for the blocks of 256 elements that are whole: all but the last one of a tensor. Returns a bit for each
// block that is not, or for which it returns false.
template <class Update>
__device__ __forceinline__ uint32_t for_whole(const Chunk& chunk, Update update) {
    uint32_t left = 0;
    for (int block = 0; block * code_block < chunk.size; ++block) {
        if ((block + 1) * code_block > chunk.size || !update(block)) {
            left |= 1u << block;
        }
    }
    return left;
}

}  // namespace detail

template <class Octets, class G, class P>
__device__ __forceinline__ uint32_t update_whole(const Factors& f, const TableAddresses& tables, const Chunk& chunk,
                                                 Largest& largest) {
    detail::Scales scales(chunk);
    const uint32_t left = detail::for_whole(
        chunk, [&](int block) { return detail::update_octet<Octets, G, P>(f, tables, chunk, block, scales, largest); });
    scales.store(chunk, left);
    return left;
}

template <class Octets, class G, class P>
__device__ __forceinline__ uint32_t update_whole(const Factors& f, const Chunk& chunk, Largest& largest) {
    return detail::for_whole(chunk, [&](int block) { return detail::update_octet<Octets, G, P>(f, chunk, block, largest); });
}

}  // namespace surogate
