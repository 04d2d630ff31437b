// The update of an octet of any values, dtypes and alignment, of which only some elements may exist.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "chunk.cuh"
#include "codes.cuh"
#include "element.cuh"
#include "surogate/param_table.cuh"
#include "surogate/philox.cuh"

namespace surogate {
namespace detail {

// Loads the first `count` codes; the others are those of 0.
__device__ __forceinline__ uint2 load_codes(const void* base, int64_t first, int count, uint32_t zero) {
    const uint8_t* codes = static_cast<const uint8_t*>(base) + first;
    uint2 x = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        const uint32_t code = (i < count ? codes[i] : zero) << (8 * (i % 4));
        (i < 4 ? x.x : x.y) |= code;
    }
    return x;
}

__device__ __forceinline__ void store_codes(void* base, int64_t first, uint2 x, int count) {
    uint8_t* codes = static_cast<uint8_t*>(base) + first;
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        if (i < count) {
            codes[i] = static_cast<uint8_t>((i < 4 ? x.x : x.y) >> (8 * (i % 4)));
        }
    }
}

// Stores masters, with stochastic rounding to bf16. Sets `p` to the stored values.
__device__ __forceinline__ void store_master(const Factors& f, const Chunk& chunk, int first, float (&p)[octet],
                                             int count, bool whole) {
    const Entry& entry = chunk.entry;
    const bool bf16 = entry.flags & master_bf16;
    if (bf16) {
        const PhiloxWords random = random_halves(chunk.block + first / octet, f.seed, entry.stream, f.step);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            p[i] = __bfloat162float(stochastic_round_bf16(p[i], random.half(i)));
        }
    }
    store_octet(entry.master, bf16, first, p, count, whole);
}

}  // namespace detail

// Updates up to eight elements: none if `first` is beyond the chunk. With codes, it is called by whole warps, each for a
// block.
__device__ __forceinline__ void update_any_octet(const Factors& f, const TableAddresses& tables, const Chunk& chunk,
                                                 int first, bool aligned, Largest& largest) {
    const Entry& entry = chunk.entry;
    const int block = first / code_block;
    const int count = min(max(chunk.size - first, 0), octet);
    const bool whole = aligned && count == octet, coded = entry.is_coded();
    float g[octet], p[octet], m[octet], v[octet];
    load_octet(entry.grad, entry.flags & grad_bf16, first, g, count, whole);
    load_octet(entry.master, entry.flags & master_bf16, first, p, count, whole);
    if (coded) {
        tables.decode_m(detail::load_codes(entry.m, first, count, zero_code), entry.m_scales[block], m);
        tables.decode_v(detail::load_codes(entry.v, first, count, 0), entry.v_scales[block], v);
    } else {
        load_octet(entry.m, false, first, m, count, whole);
        load_octet(entry.v, false, first, v, count, whole);
    }
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        update_moments(f, g[i], m[i], v[i]);
        update_param(f, chunk.decay, m[i], v[i], p[i]);
        if (i >= count) {
            m[i] = v[i] = 0.0f;  // 0 times a scale that is not finite is NaN
        }
    }
    if (coded) {
        const Magnitudes<true> ms(m);
        const Magnitudes<false> vs(v);
        const float m_scale = ms.scale(), v_scale = vs.scale();
        detail::store_codes(entry.m, first, encode_any(tables, ms, m_scale), count);
        detail::store_codes(entry.v, first, encode_any(tables, vs, v_scale), count);
        if (threadIdx.x % 32 == 0) {
            entry.m_scales[block] = m_scale;
            entry.v_scales[block] = v_scale;
        }
    } else {
        store_octet(entry.m, false, first, m, count, whole);
        store_octet(entry.v, false, first, v, count, whole);
    }
    detail::store_master(f, chunk, first, p, count, whole);
    if (entry.copy != nullptr) {
        store_octet(entry.copy, entry.flags & copy_bf16, first, p, count, whole);
    }
    add_param(entry, p, count, largest);
}

}  // namespace surogate
