// The entries of the table of `adamw_8bit`, and the chunks that warps update.
#pragma once

#include <cstdint>

#include "codes.cuh"
#include "element.cuh"
#include "surogate/param_table.cuh"

namespace surogate {

struct Entry : ParamEntry {
    float* m_scales;  // null if the moments are fp32
    float* v_scales;

    __device__ __forceinline__ bool is_coded() const { return m_scales != nullptr; }
};
static_assert(sizeof(Entry) == 13 * sizeof(int64_t));

// One chunk of one tensor: at most 32 blocks of codes.
struct Chunk {
    Entry entry;    // its pointers are those of the chunk's first element
    int64_t block;  // that of its first eight elements (philox.cuh)
    int size;
    float decay;
};

constexpr int64_t max_chunk_size = 32 * code_block;

__device__ __forceinline__ Chunk chunk_of(const Factors& f, Entry entry, int index, int chunk_size) {
    const int64_t begin = (index - entry.first_chunk) * chunk_size;
    const int64_t moment_bytes = entry.is_coded() ? 1 : 4, scale = begin / code_block * 4;
    entry.advance(begin, moment_bytes, moment_bytes);
    detail::advance(entry.m_scales, scale);
    detail::advance(entry.v_scales, scale);
    const int64_t size = min(static_cast<int64_t>(chunk_size), entry.size - begin);
    return {entry, entry.block_of(begin), static_cast<int>(size), decay_of(f, entry.weight_decay)};
}

}  // namespace surogate
