// adamw_8bit: one step of AdamW for all params in one launch, with moments in 8 bits or fp32.
//
//   g = clip_coef * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p *= 1 - lr wd;
//   p -= size * m / (sqrt(v) + eps'),   size = lr sqrt(1 - b2^t) / (1 - b1^t),  eps' = eps sqrt(1 - b2^t)
//
// Arithmetic is fp32. Each operation is rounded separately (no fused multiply-add), in the order of
// `surogate_optim_adamw_8bit.reference:adamw_8bit`, so results are bit-identical to it. The param is updated with the
// moments before they are quantized. bf16 masters are stored with stochastic rounding. If clip_coef is not finite, nothing
// but the amax is written.
//
//   table      [tensors] entries of 12 int64 words, see Entry: grad and master, each fp32 or bf16; m and v, both uint8
//              codes or both fp32; for codes the scales of m and v, fp32 [ceil(size / 256)], the largest magnitude of each
//              block of 256 elements; optionally a work copy, fp32 or bf16, which receives the stored master, rounded to
//              nearest; optionally an fp32 amax, which receives the largest magnitude of the param, NaN if an element is
//              NaN. The param is the work copy, or else the master. Masters, moments and scales are updated in place.
//              Chunks are numbered consecutively over all tensors; a tensor of `size` elements has
//              ceil(size / chunk_size) chunks.
//   codes      the tables of codes.cuh: `kernels.code_words`
//   clip_coef, lr  fp32 scalars; step int32 scalar, 1 at the first step; seed int64 scalar; all in device memory
//   workspace      Factors, computed from the scalars by a launch of one block, which also sets every amax to 0
//
// Random bits of a bf16 master: Philox with the key `seed` and the counter (index of the eight elements, stream of the
// param, step), as in philox.cuh.
//
// Any size. Pointers are aligned to their element. Grid: as many blocks as fit on the device, each with the tables in
// 94 KiB of shared memory; block i takes the chunks i, i + grid, ... A thread processes eight elements per iteration, and
// a warp a block of codes, so that its scale is a reduction of the warp. The first loop updates what
// `update_coded_octet` and `update_wide_octet` can: whole octets (for codes: whole blocks) in buffers that are all aligned
// to 16 bytes, with values in the usual range. The second loop updates the others, at about a third of the speed: also
// blocks of codes with a moment that is 0 or below 2^-30 of the largest, so elements that never had a gradient. A maximum
// of bits is the same in any order.
//
// Bytes moved per element with codes (2.03 read and 2.03 written of moments and scales): 18.06 with fp32 gradient and
// master and a bf16 copy, 12.06 with fp32 gradient and bf16 master, 10.06 with both in bf16: floors of 4.24, 2.83 and
// 2.36 ms per 10^9 elements at 4.26 TB/s.
//
// Instructions per element, counted in the code for SM90: 60 with fp32 master and bf16 copy, 68 with both in bf16, of which
// 28 are the arithmetic, 14 the search of the codes, 6 their decoding, 2 the test of the range and 9 the random bits. An
// SM issues 128 per clock, so at 1.7 GHz both in bf16 are limited to 4.2 TB/s. The ALU takes 20 of the 68, at half the
// rate, and the search takes 3.3 accesses to a bank of shared memory in turn, decoding 1.
//
// Measured on an H200 at 1,980 MHz, 1.07e9 elements, share of 4.21 TB/s by gradient and master: 65 % bf16, bf16; 72 % fp32,
// bf16; 79 % fp32, fp32; 74 % bf16, fp32; with fp32 moments 91 %. Without the prefetch 57, 63, 70 and 64 %, and with
// other numbers of threads between 54 and 75 %: loads are waited for, although the instructions would suffice. Then
// every block of codes waited for its two scales; since `Scales` loads them for a chunk, nothing has been measured.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "adamw_8bit.h"
#include "codes.cuh"
#include "element.cuh"
#include "surogate/check.h"
#include "surogate/octet.cuh"
#include "surogate/philox.cuh"
#include "surogate/words.cuh"

namespace surogate {
namespace {

constexpr const char* op = "adamw_8bit";
constexpr int threads = 384;
constexpr int blocks_per_sm = 2;
constexpr int stride = threads * octet;  // elements that a block updates at a time
constexpr int64_t max_chunk_size = 32 * stride;

// Bits of Entry::flags. `surogate_optim_adamw_8bit.kernels` sets them.
constexpr uint32_t grad_bf16 = 1;
constexpr uint32_t master_bf16 = 2;
constexpr uint32_t copy_bf16 = 4;

struct Entry {
    const void* grad;
    void* master;
    void* m;
    void* v;
    float* m_scales;  // null if the moments are fp32
    float* v_scales;
    void* copy;      // null if the master is the param itself
    uint32_t* amax;  // bits of a non-negative float; null if nobody reads it
    int64_t size;
    int64_t first_chunk;
    double weight_decay;
    uint32_t stream;
    uint32_t flags;
};
static_assert(sizeof(Entry) == 12 * sizeof(int64_t));

// One chunk of one tensor.
struct Chunk {
    Entry entry;     // its pointers are those of the chunk's first element
    int64_t origin;  // the first element / 8
    int size;
    float decay;
};

__device__ __forceinline__ uint2 load_codes(const void* codes, uint32_t first) {
    __builtin_assume(__isGlobal(codes));
    return *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(codes) + first);
}

__device__ __forceinline__ void store_codes(void* codes, uint32_t first, uint2 x) {
    __builtin_assume(__isGlobal(codes));
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(codes) + first) = x;
}

// The scales of the blocks of codes that a warp updates in a chunk, first the old and then the new ones: lane i has those
// of the warp's i-th block. All are loaded at once, before any is needed. A load for each block would be waited for each
// time, because a prefetch of elements does not reach their scales.
class Scales {
public:
    __device__ __forceinline__ explicit Scales(const Chunk& chunk)
        : block_(threadIdx.x / 32 + threadIdx.x % 32 * (threads / 32)), any_(block_ * code_block < chunk.size) {
        const Entry& entry = chunk.entry;
        __builtin_assume(__isGlobal(entry.m_scales) && __isGlobal(entry.v_scales));
        m_ = any_ ? entry.m_scales[block_] : 0.0f;
        v_ = any_ ? entry.v_scales[block_] : 0.0f;
    }
    // `turn`: which block of the warp.
    __device__ __forceinline__ float m(int turn) const { return __shfl_sync(0xffffffffu, m_, turn); }
    __device__ __forceinline__ float v(int turn) const { return __shfl_sync(0xffffffffu, v_, turn); }
    __device__ __forceinline__ void set(int turn, float m, float v) {
        const bool mine = threadIdx.x % 32 == turn;
        m_ = mine ? m : m_;
        v_ = mine ? v : v_;
    }
    // Stores all but those of the blocks whose bit is set in `left`.
    __device__ __forceinline__ void store(const Chunk& chunk, uint32_t left) const {
        if (any_ && !(left >> threadIdx.x % 32 & 1)) {
            chunk.entry.m_scales[block_] = m_;
            chunk.entry.v_scales[block_] = v_;
        }
    }

private:
    int block_;
    bool any_;
    float m_, v_;
};

// Stores the master and the work copy of an octet, and adds the param to `largest`.
template <class P>
__device__ __forceinline__ void store_param(const Factors& f, const Chunk& chunk, uint32_t offset, float (&p)[octet],
                                            Largest& largest) {
    const Entry& entry = chunk.entry;
    // A chunk does not cross a multiple of 2^32 blocks of eight.
    const uint32_t low = static_cast<uint32_t>(chunk.origin) + offset / octet;
    const uint32_t high = static_cast<uint32_t>(chunk.origin >> 32);
    const auto random = [&](uint32_t stream) {
        return philox4x32_10(low, high, stream, static_cast<uint32_t>(f.step), f.keys);
    };
    const Words<P> new_p = Words<P>::rounded(p, random, entry.stream);
    new_p.store(entry.master, offset);
    const bool measured = entry.amax != nullptr;
    if (entry.copy == nullptr) {
        if (measured) {
            largest.add(new_p);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        p[i] = new_p.get(i);
    }
    if (entry.flags & copy_bf16) {
        const auto copy = Words<__nv_bfloat16>::nearest(p);
        copy.store(entry.copy, offset);
        if (measured) {
            largest.add(copy);
        }
    } else {
        const auto copy = Words<float>::nearest(p);
        copy.store(entry.copy, offset);
        if (measured) {
            largest.add(copy);
        }
    }
}

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

// Updates eight elements with codes and returns true, or writes nothing and returns false if one of the block is not in
// range. Called by whole warps, for the whole block of codes of a turn.
template <class G, class P>
__device__ __forceinline__ bool update_coded_octet(const Factors& f, const TableAddresses& tables, const Chunk& chunk,
                                                   uint32_t offset, int turn, Scales& scales, Largest& largest) {
    const Entry& entry = chunk.entry;
    const Words<G> g = Words<G>::load(entry.grad, offset);
    const uint2 old_m = load_codes(entry.m, offset), old_v = load_codes(entry.v, offset);
    const Words<P> old_p = Words<P>::load(entry.master, offset);
    float p[octet], m[octet], v[octet];
    tables.decode_m(old_m, __fmul_rn(scales.m(turn), m_scaling), m);
    tables.decode_v(old_v, __fmul_rn(scales.v(turn), v_scaling), v);
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        update_scaled_moments(f, g.get(i), m[i], v[i]);
    }
    if (offset / code_block * code_block + stride < static_cast<uint32_t>(chunk.size)) {
        const uint32_t next = offset + stride;
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
    scales.set(turn, __fmul_rn(m_scale, 1 / m_scaling), __fmul_rn(v_scale, 1 / v_scaling));
    store_param<P>(f, chunk, offset, p, largest);
    return true;
}

// Updates the octets of this thread that `update_coded_octet` can. Returns a bit for each of the others. A warp takes a
// block of codes at a time, of which only the last one of a tensor may not be whole.
template <class G, class P>
__device__ __forceinline__ uint32_t update_coded(const Factors& f, const TableAddresses& tables, const Chunk& chunk,
                                                 Largest& largest) {
    const int lane = threadIdx.x % 32 * octet;
    Scales scales(chunk);
    uint32_t left = 0;
    int turn = 0;
    for (int base = threadIdx.x / 32 * code_block; base < chunk.size; base += stride, ++turn) {
        if (base + code_block > chunk.size ||
            !update_coded_octet<G, P>(f, tables, chunk, base + lane, turn, scales, largest)) {
            left |= 1u << turn;
        }
    }
    scales.store(chunk, left);
    return left;
}

// Updates eight elements with fp32 moments and returns true, or writes nothing and returns false if one is not in range.
template <class G, class P>
__device__ __forceinline__ bool update_wide_octet(const Factors& f, const Chunk& chunk, uint32_t offset, Largest& largest) {
    const Entry& entry = chunk.entry;
    const Words<G> g = Words<G>::load(entry.grad, offset);
    const Words<float> old_m = Words<float>::load(entry.m, offset), old_v = Words<float>::load(entry.v, offset);
    const Words<P> old_p = Words<P>::load(entry.master, offset);
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
    if (!in_range) {
        return false;
    }
    Words<float>::nearest(m).store(entry.m, offset);
    Words<float>::nearest(v).store(entry.v, offset);
    store_param<P>(f, chunk, offset, p, largest);
    return true;
}

// As `update_coded`, for fp32 moments.
template <class G, class P>
__device__ __forceinline__ uint32_t update_wide(const Factors& f, const Chunk& chunk, Largest& largest) {
    uint32_t left = 0, bit = 1;
    for (int offset = threadIdx.x * octet; offset < chunk.size; offset += stride, bit <<= 1) {
        if (offset + octet > chunk.size || !update_wide_octet<G, P>(f, chunk, offset, largest)) {
            left |= bit;
        }
    }
    return left;
}

__device__ __forceinline__ void load(const void* base, bool bf16, int64_t first, float (&x)[octet], int count,
                                     bool whole) {
    if (bf16) {
        load_octet(static_cast<const __nv_bfloat16*>(base) + first, x, count, whole);
    } else {
        load_octet(static_cast<const float*>(base) + first, x, count, whole);
    }
}

__device__ __forceinline__ void store(void* base, bool bf16, int64_t first, const float (&x)[octet], int count,
                                      bool whole) {
    if (bf16) {
        store_octet(static_cast<__nv_bfloat16*>(base) + first, x, count, whole);
    } else {
        store_octet(static_cast<float*>(base) + first, x, count, whole);
    }
}

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

// Adds the first `count` elements of the param whose master has the values `p`.
__device__ __forceinline__ void add_param(const Entry& entry, const float (&p)[octet], int count, Largest& largest) {
    float param[octet];
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        const float x = i < count ? p[i] : 0.0f;
        param[i] = entry.flags & copy_bf16 ? __bfloat162float(__float2bfloat16_rn(x)) : x;
    }
    largest.add(Words<float>::nearest(param));
}

// Stores masters, with stochastic rounding to bf16. Sets `p` to the stored values.
__device__ __forceinline__ void store_master(const Factors& f, const Chunk& chunk, int first, float (&p)[octet],
                                             int count, bool whole) {
    const Entry& entry = chunk.entry;
    const bool bf16 = entry.flags & master_bf16;
    if (bf16) {
        const PhiloxWords random = random_halves(chunk.origin + first / octet, f.seed, entry.stream, f.step);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            p[i] = __bfloat162float(stochastic_round_bf16(p[i], random.half(i)));
        }
    }
    store(entry.master, bf16, first, p, count, whole);
}

// Updates up to eight elements of any value, dtype and alignment: none if `offset` is beyond the chunk. With codes, it is
// called by whole warps.
__device__ __forceinline__ void update_octet(const Factors& f, const TableAddresses& tables, const Chunk& chunk, int offset,
                                             bool aligned, Largest& largest) {
    const Entry& entry = chunk.entry;
    const int first = offset, block = offset / code_block;
    const int count = min(max(chunk.size - offset, 0), octet);
    const bool whole = aligned && count == octet, coded = entry.m_scales != nullptr;
    float g[octet], p[octet], m[octet], v[octet];
    load(entry.grad, entry.flags & grad_bf16, first, g, count, whole);
    load(entry.master, entry.flags & master_bf16, first, p, count, whole);
    if (coded) {
        tables.decode_m(load_codes(entry.m, first, count, zero_code), entry.m_scales[block], m);
        tables.decode_v(load_codes(entry.v, first, count, 0), entry.v_scales[block], v);
    } else {
        load(entry.m, false, first, m, count, whole);
        load(entry.v, false, first, v, count, whole);
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
        store_codes(entry.m, first, encode_any(tables, ms, m_scale), count);
        store_codes(entry.v, first, encode_any(tables, vs, v_scale), count);
        if (threadIdx.x % 32 == 0) {
            entry.m_scales[block] = m_scale;
            entry.v_scales[block] = v_scale;
        }
    } else {
        store(entry.m, false, first, m, count, whole);
        store(entry.v, false, first, v, count, whole);
    }
    store_master(f, chunk, first, p, count, whole);
    if (entry.copy != nullptr) {
        store(entry.copy, entry.flags & copy_bf16, first, p, count, whole);
    }
    add_param(entry, p, count, largest);
}

// As `update_coded` or `update_wide`, for the dtypes of the tensor.
__device__ __forceinline__ uint32_t update_chunk(const Factors& f, const TableAddresses& tables, const Chunk& chunk,
                                                 bool aligned, Largest& largest) {
    using Wide = float;
    using Half = __nv_bfloat16;
    if (!aligned || !f.in_range || !isfinite(chunk.decay)) {
        return ~0u;
    }
    constexpr uint32_t coded = 1u << 31;
    const uint32_t moments = chunk.entry.m_scales != nullptr ? coded : 0;
    switch ((chunk.entry.flags & (grad_bf16 | master_bf16)) | moments) {
        case coded | grad_bf16 | master_bf16:
            return update_coded<Half, Half>(f, tables, chunk, largest);
        case coded | master_bf16:
            return update_coded<Wide, Half>(f, tables, chunk, largest);
        case coded | grad_bf16:
            return update_coded<Half, Wide>(f, tables, chunk, largest);
        case coded:
            return update_coded<Wide, Wide>(f, tables, chunk, largest);
        case grad_bf16 | master_bf16:
            return update_wide<Half, Half>(f, chunk, largest);
        case master_bf16:
            return update_wide<Wide, Half>(f, chunk, largest);
        case grad_bf16:
            return update_wide<Half, Wide>(f, chunk, largest);
        default:
            return update_wide<Wide, Wide>(f, chunk, largest);
    }
}

// Adds the elements of the param in a skipped step.
__device__ __forceinline__ void add_chunk(const Chunk& chunk, bool aligned, Largest& largest) {
    for (int offset = threadIdx.x * octet; offset < chunk.size; offset += stride) {
        const int count = chunk.size - offset;
        float p[octet];
        load(chunk.entry.master, chunk.entry.flags & master_bf16, offset, p, count, aligned && count >= octet);
        add_param(chunk.entry, p, count, largest);
    }
}

// Chunk i belongs to the last tensor whose first chunk is at or before it. An empty tensor has the same first chunk as
// the next tensor. Called by whole warps, each of which searches in two or three rounds of loads.
__device__ __forceinline__ const Entry& entry_of(const Entry* table, uint32_t tensors, int chunk) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t step = 1, found = 0;
    while (step * 32 < tensors) {
        step *= 32;
    }
    for (; step > 0; step /= 32) {
        const uint32_t i = found + lane * step;
        found = __reduce_max_sync(0xffffffffu, i < tensors && table[i].first_chunk <= chunk ? i : found);
    }
    return table[found];
}

__global__ void __launch_bounds__(threads)
    prepare_kernel(const Entry* table, const float* clip_coef, const float* lr, const int32_t* step, const int64_t* seed,
                   int tensors, double beta1, double beta2, double epsilon, Factors* result) {
    if (threadIdx.x == 0) {
        *result = factors(*clip_coef, *lr, *step, *seed, beta1, beta2, epsilon);
    }
    for (int i = threadIdx.x; i < tensors; i += threads) {
        if (table[i].amax != nullptr) {
            *table[i].amax = 0;
        }
    }
}

// Returns a pointer `first` elements after `base`, which may be null.
template <class T>
__device__ __forceinline__ T* advanced(T* base, int64_t first, int element_bytes) {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return base == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + first * element_bytes);
}

__device__ __forceinline__ Chunk chunk_of(const Factors& f, Entry entry, int index, int chunk_size) {
    const int64_t begin = (index - entry.first_chunk) * chunk_size;
    const bool coded = entry.m_scales != nullptr;
    entry.grad = advanced(entry.grad, begin, entry.flags & grad_bf16 ? 2 : 4);
    entry.master = advanced(entry.master, begin, entry.flags & master_bf16 ? 2 : 4);
    entry.m = advanced(entry.m, begin, coded ? 1 : 4);
    entry.v = advanced(entry.v, begin, coded ? 1 : 4);
    entry.m_scales = advanced(entry.m_scales, begin / code_block, 4);
    entry.v_scales = advanced(entry.v_scales, begin / code_block, 4);
    entry.copy = advanced(entry.copy, begin, entry.flags & copy_bf16 ? 2 : 4);
    const int64_t size = min(static_cast<int64_t>(chunk_size), entry.size - begin);
    return {entry, begin / octet, static_cast<int>(size), decay_of(f, entry.weight_decay)};
}

__device__ __forceinline__ bool is_aligned(const Entry& entry) {
    const void* buffers[] = {entry.grad, entry.master, entry.m, entry.v, entry.copy};
    uintptr_t addresses = 0;
#pragma unroll
    for (const void* buffer : buffers) {
        addresses |= reinterpret_cast<uintptr_t>(buffer);
    }
    return addresses % 16 == 0;
}

__global__ void __launch_bounds__(threads, blocks_per_sm)
    adamw_8bit_kernel(const Entry* table, const uint32_t* codes, const Factors* prepared, int tensors, int chunks,
                      int chunk_size) {
    extern __shared__ CodeTables code_tables[];
    __shared__ Entry entries[2];
    load_tables(*code_tables, codes);
    const TableAddresses tables(*code_tables);
    const Factors f = *prepared;
    int turn = 0;
    for (int index = blockIdx.x; index < chunks; index += gridDim.x, turn ^= 1) {
        const Entry& found = entry_of(table, tensors, index);
        if (threadIdx.x == 0) {
            entries[turn] = found;
        }
        __syncthreads();  // no thread reads the entry of the chunk before the last any more; the tables are filled
        const Chunk chunk = chunk_of(f, entries[turn], index, chunk_size);
        const Entry& entry = chunk.entry;
        const bool aligned = is_aligned(entry);
        Largest largest;
        if (isfinite(f.coef)) {
            uint32_t left = update_chunk(f, tables, chunk, aligned, largest);
            const int lane = threadIdx.x % 32;
            for (int base = threadIdx.x / 32 * code_block; base < chunk.size && left != 0; base += stride, left >>= 1) {
                if (left & 1) {
                    update_octet(f, tables, chunk, base + lane * octet, aligned, largest);
                }
            }
        } else if (entry.amax != nullptr) {
            add_chunk(chunk, aligned, largest);
        }
        if (entry.amax != nullptr) {
            __syncwarp();
            const uint32_t top = __reduce_max_sync(0xffffffffu, largest.bits());
            if (threadIdx.x % 32 == 0) {
                atomicMax(entry.amax, top);
            }
        }
    }
}

int grid_size(int chunks) {
    int device = 0, multiprocessors = 0, blocks = 0;
    check_cuda(cudaGetDevice(&device), op);
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), op);
    const int bytes = sizeof(CodeTables);
    check_cuda(cudaFuncSetAttribute(adamw_8bit_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, adamw_8bit_kernel, threads, bytes), op);
    return std::min(multiprocessors * blocks, chunks);
}

}  // namespace

int64_t adamw_8bit_workspace() { return sizeof(Factors); }

void adamw_8bit(const void* table, const void* codes, const void* clip_coef, const void* lr, const void* step,
                const void* seed, void* workspace, int64_t workspace_bytes, int64_t tensors, int64_t chunks,
                int64_t chunk_size, double beta1, double beta2, double epsilon, cudaStream_t stream) {
    check_pointer(table, op, "table", 8);
    check_pointer(codes, op, "codes", 4);
    check_pointer(clip_coef, op, "clip_coef", 4);
    check_pointer(lr, op, "lr", 4);
    check_pointer(step, op, "step", 4);
    check_pointer(seed, op, "seed", 8);
    check_pointer(workspace, op, "workspace", alignof(Factors));
    SUROGATE_REQUIRE(workspace_bytes >= adamw_8bit_workspace(), op,
                     "workspace must have " + std::to_string(adamw_8bit_workspace()) + " bytes, got " +
                         std::to_string(workspace_bytes));
    check_positive(tensors, op, "tensors");
    check_positive(chunks, op, "chunks");
    check_positive(chunk_size, op, "chunk_size");
    SUROGATE_REQUIRE((chunk_size & (chunk_size - 1)) == 0 && chunk_size >= code_block && chunk_size <= max_chunk_size, op,
                     "chunk_size must be a power of two from 256 to " + std::to_string(max_chunk_size) + ", got " +
                         std::to_string(chunk_size));
    SUROGATE_REQUIRE(beta1 >= 0 && beta1 < 1, op, "beta1 must be in [0, 1), got " + std::to_string(beta1));
    SUROGATE_REQUIRE(beta2 >= 0 && beta2 < 1, op, "beta2 must be in [0, 1), got " + std::to_string(beta2));
    SUROGATE_REQUIRE(epsilon > 0, op, "epsilon must be positive, got " + std::to_string(epsilon));
    const Entry* entries = static_cast<const Entry*>(table);
    Factors* prepared = static_cast<Factors*>(workspace);
    const int count = to_int(tensors, op, "tensors"), whole = to_int(chunks, op, "chunks");
    prepare_kernel<<<1, threads, 0, stream>>>(entries, static_cast<const float*>(clip_coef),
                                              static_cast<const float*>(lr), static_cast<const int32_t*>(step),
                                              static_cast<const int64_t*>(seed), count, beta1, beta2, epsilon,
                                              prepared);
    adamw_8bit_kernel<<<grid_size(whole), threads, sizeof(CodeTables), stream>>>(
        entries, static_cast<const uint32_t*>(codes), prepared, count, whole, static_cast<int>(chunk_size));
    check_launch(op);
}

}  // namespace surogate
