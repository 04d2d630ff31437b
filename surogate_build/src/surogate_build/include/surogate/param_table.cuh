// The params that an element-wise optimizer updates in one launch: a table of them in device memory, split into chunks, and
// what happens to a param besides the arithmetic.
//
//   const ParamEntry& entry = entry_of(table, params, chunk);    // whole warps; also for a struct derived from ParamEntry
//   const int64_t begin = (chunk - entry.first_chunk) * chunk_size;
//   const PhiloxWords random = random_halves(entry.block_of(begin), seed, entry.stream, step);
//   clear_amaxes(table, params);                                 // a block, in an earlier launch
//
// 32 octets, which all exist and are aligned to 16 bytes, by a warp (words.cuh):
//
//   using Octets = OctetPerLane;                                 // WholeSectors if entry.flags & on_host
//   const auto g = Octets::load<float>(entry.grad, first);
//   store_copy<Octets>(entry, master, first, largest);           // the work copy of the stored master
//
// or any eight elements, of which only `count` exist (whole: as in octet.cuh):
//
//   load_octet(entry.grad, entry.flags & grad_bf16, first, x, count, whole);
//   store_octet(entry.copy, entry.flags & copy_bf16, first, x, count, whole);
//   add_param(entry, masters, count, largest);
//
//   store_amax(entry, largest);                                  // whole warps, after the last element
//
// The param is the work copy, or else the master. Its amax is the largest magnitude, NaN if an element is NaN: a maximum of
// bits, hence the same in any order. A tensor of `size` elements has ceil(size / chunk_size) chunks, and chunks are numbered
// consecutively over all tensors. `surogate_core.api.param_update` writes the words of an entry.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "surogate/octet.cuh"
#include "surogate/words.cuh"

namespace surogate {

// Bits of ParamEntry::flags.
constexpr uint32_t grad_bf16 = 1;
constexpr uint32_t master_bf16 = 2;
constexpr uint32_t m_bf16 = 4;
constexpr uint32_t v_bf16 = 8;
constexpr uint32_t copy_bf16 = 16;
constexpr uint32_t on_host = 32;  // any of the buffers

namespace detail {
// Moves a pointer, which may be null, by `bytes`.
template <class T>
__device__ __forceinline__ void advance(T*& pointer, int64_t bytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    pointer = reinterpret_cast<T*>(pointer == nullptr ? 0 : address + bytes);
}
}  // namespace detail

struct ParamEntry {
    const void* grad;
    void* master;
    void* m;
    void* v;
    void* copy;      // null if the master is the param itself
    uint32_t* amax;  // bits of a non-negative float; null if nobody reads it
    int64_t size;
    int64_t first_chunk;
    double weight_decay;
    uint32_t stream;
    uint32_t flags;
    int64_t first;  // element of the whole tensor that the buffers begin with: 0, or a multiple of 256 if they are a part

    // Returns which eight elements of the whole tensor begin at element `i` of the buffers, a multiple of 8: the block of
    // philox.cuh. A rank draws the bits of its elements whatever part it holds. A signed division would spill registers.
    __device__ __forceinline__ int64_t block_of(int64_t i) const { return static_cast<uint64_t>(first + i) / octet; }

    // Moves the addresses to element `i`. m_bytes, v_bytes: of an element of m and v.
    __device__ __forceinline__ void advance(int64_t i, int64_t m_bytes, int64_t v_bytes) {
        detail::advance(grad, i * (flags & grad_bf16 ? 2 : 4));
        detail::advance(master, i * (flags & master_bf16 ? 2 : 4));
        detail::advance(m, i * m_bytes);
        detail::advance(v, i * v_bytes);
        detail::advance(copy, i * (flags & copy_bf16 ? 2 : 4));
    }

    __device__ __forceinline__ bool is_aligned() const {
        const uintptr_t addresses = reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(master) |
                                    reinterpret_cast<uintptr_t>(m) | reinterpret_cast<uintptr_t>(v) |
                                    reinterpret_cast<uintptr_t>(copy);
        return addresses % 16 == 0;
    }
};
static_assert(sizeof(ParamEntry) == 11 * sizeof(int64_t));

// Returns the entry of a chunk: the last one whose first chunk is at or before it. An empty tensor has the same first chunk
// as the next tensor. Called by whole warps, each of which searches in two or three rounds of loads.
template <class Entry>
__device__ __forceinline__ const Entry& entry_of(const Entry* table, uint32_t params, int chunk) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t step = 1, found = 0;
    while (step * 32 < params) {
        step *= 32;
    }
    for (; step > 0; step /= 32) {
        const uint32_t i = found + lane * step;
        found = __reduce_max_sync(0xffffffffu, i < params && table[i].first_chunk <= chunk ? i : found);
    }
    return table[found];
}

template <class Entry>
__device__ __forceinline__ void clear_amaxes(const Entry* table, int params) {
    for (int i = threadIdx.x; i < params; i += blockDim.x) {
        if (table[i].amax != nullptr) {
            *table[i].amax = 0;
        }
    }
}

// Adds the largest magnitude of the warp's elements.
__device__ __forceinline__ void store_amax(const ParamEntry& entry, const Largest& largest) {
    if (entry.amax != nullptr) {
        __syncwarp();
        const uint32_t top = __reduce_max_sync(0xffffffffu, largest.bits());
        if (threadIdx.x % 32 == 0) {
            atomicMax(entry.amax, top);
        }
    }
}

__device__ __forceinline__ void load_octet(const void* base, bool bf16, int64_t first, float (&x)[octet], int count,
                                           bool whole) {
    if (bf16) {
        load_octet(static_cast<const __nv_bfloat16*>(base) + first, x, count, whole);
    } else {
        load_octet(static_cast<const float*>(base) + first, x, count, whole);
    }
}

__device__ __forceinline__ void store_octet(void* base, bool bf16, int64_t first, const float (&x)[octet], int count,
                                            bool whole) {
    if (bf16) {
        store_octet(static_cast<__nv_bfloat16*>(base) + first, x, count, whole);
    } else {
        store_octet(static_cast<float*>(base) + first, x, count, whole);
    }
}

// Stores the work copy of 32 octets of stored masters that begin at `first`, rounded to nearest, if there is one, and adds the
// param to `largest`. Called by whole warps.
template <class Octets, class P>
__device__ __forceinline__ void store_copy(const ParamEntry& entry, const Words<P>& master, int64_t first,
                                           Largest& largest) {
    const bool measured = entry.amax != nullptr;
    if (entry.copy == nullptr) {
        if (measured) {
            largest.add(master);
        }
        return;
    }
    float p[octet];
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        p[i] = master.get(i);
    }
    if (entry.flags & copy_bf16) {
        const auto copy = Words<__nv_bfloat16>::nearest(p);
        Octets::store(entry.copy, first, copy);
        if (measured) {
            largest.add(copy);
        }
    } else {
        const auto copy = Words<float>::nearest(p);
        Octets::store(entry.copy, first, copy);
        if (measured) {
            largest.add(copy);
        }
    }
}

// Adds the first `count` elements of the param whose master has the values `p`.
__device__ __forceinline__ void add_param(const ParamEntry& entry, const float (&p)[octet], int count, Largest& largest) {
    float param[octet];
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        const float x = i < count ? p[i] : 0.0f;
        param[i] = entry.flags & copy_bf16 ? __bfloat162float(__float2bfloat16_rn(x)) : x;
    }
    largest.add(Words<float>::nearest(param));
}

}  // namespace surogate
