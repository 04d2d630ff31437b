// adamw: one step of AdamW (Loshchilov & Hutter 2019) for all params in one launch.
//
//   g = clip_coef * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p *= 1 - lr wd;
//   p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// Arithmetic is fp32 on the unrounded moments. Each operation is rounded separately (no fused multiply-add), in the
// order of `surogate_optim_adamw.reference:adamw`, so results are bit-identical to it. bf16 masters and moments are
// stored with stochastic rounding. If clip_coef is not finite, nothing but the amax is written.
//
//   table      [tensors] entries of 11 int64 words (param_table.cuh): grad, master, m and v, each fp32 or bf16; optionally a
//              work copy, fp32 or bf16, and an fp32 amax. Masters and moments are updated in place.
//   clip_coef, lr  fp32 scalars; step int32 scalar, 1 at the first step; seed int64 scalar; all in device memory
//   workspace      Factors, computed from the scalars by a launch of one block, which also sets every amax to 0
//
// Random bits: Philox with the key `seed` and the counter (index of the eight elements in the whole param, stream of the
// value, step). A param has three streams: its own and two that differ from it in fixed bits (philox.cuh).
//
// Any size. Pointers are aligned to their element. Grid: one block per chunk; a warp processes 256 elements per iteration.
// The first loop updates those that `update_in_range` can (element.cuh): 256 whole ones, in buffers that are all aligned to
// 16 bytes, with values in the usual range. The second loop updates the others, at half the speed.
//
// Bytes moved per element: 28 with fp32 throughout, 14 with bf16 throughout. Instructions per element, counted in the
// code for SM90: 42 with fp32 and 63 with bf16 throughout, of which 31 are the arithmetic and 13 the random bits. An SM
// issues 128 per clock, so at 1.5 GHz bf16 is limited to 5.6 TB/s. Measured on an H200, of the 4.15 TB/s of a copy: 89 to 96 %
// with bf16 throughout, 96 to 100 % with bf16 moments and fp32 gradients or masters, 100 % with fp32 throughout.
#include <cuda_bf16.h>

#include <cstdint>

#include "adamw.h"
#include "element.cuh"
#include "surogate/check.h"
#include "surogate/param_table.cuh"
#include "surogate/philox.cuh"
#include "surogate/words.cuh"

namespace surogate {
namespace {

constexpr const char* op = "adamw";
constexpr int threads = 256;
constexpr int blocks_per_sm = 3;
constexpr int warp_elements = 32 * octet;
constexpr int stride = threads * octet;  // elements that a block updates at a time
constexpr int64_t max_chunk_size = 32 * stride;

// Philox streams of the three values of a param, as in the reference.
constexpr uint32_t master_stream = 0;
constexpr uint32_t m_stream = 0x9E3779B9u;
constexpr uint32_t v_stream = 0x7F4A7C15u;

// One chunk of one tensor.
struct Chunk {
    ParamEntry entry;  // its pointers are those of the chunk's first element
    int64_t block;     // that of its first eight elements (philox.cuh)
    int size;
    float decay;
};

// Updates 32 octets, one per lane, and returns true, or writes nothing and returns false if an element is not in range.
// Called by whole warps.
template <class Octets, class G, class P, class S>
__device__ __forceinline__ bool update_words(const Factors& f, const Chunk& chunk, int first, Largest& largest) {
    const ParamEntry& entry = chunk.entry;
    const Words<G> g = Octets::template load<G>(entry.grad, first);
    const Words<S> old_m = Octets::template load<S>(entry.m, first);
    const Words<S> old_v = Octets::template load<S>(entry.v, first);
    const Words<P> old_p = Octets::template load<P>(entry.master, first);
    float p[octet], m[octet], v[octet];
    bool in_range = true;
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        p[i] = old_p.get(i), m[i] = old_m.get(i), v[i] = old_v.get(i);
        in_range &= update_in_range(f, chunk.decay, g.get(i), p[i], m[i], v[i]);
    }
    if (!__all_sync(0xffffffffu, in_range)) {
        return false;
    }
    // A chunk does not cross a multiple of 2^32 blocks: parts of tensors that are so large begin at multiples of 65536.
    const uint32_t low = static_cast<uint32_t>(chunk.block) + first / octet + Octets::index();
    const uint32_t high = static_cast<uint32_t>(chunk.block >> 32);
    const auto random = [&](uint32_t stream) {
        return philox4x32_10(low, high, entry.stream ^ stream, static_cast<uint32_t>(f.step), f.keys);
    };
    Octets::store(entry.m, first, Words<S>::rounded(m, random, m_stream));
    Octets::store(entry.v, first, Words<S>::rounded(v, random, v_stream));
    const Words<P> master = Words<P>::rounded(p, random, master_stream);
    Octets::store(entry.master, first, master);
    store_copy<Octets>(entry, master, first, largest);
    return true;
}

// Updates what `update_words` can of the octets of this warp, 32 at a time. Returns a bit for each of the others.
template <class Octets, class G, class P, class S>
__device__ __forceinline__ uint32_t update_most(const Factors& f, const Chunk& chunk, Largest& largest) {
    uint32_t left = 0, bit = 1;
    for (int offset = threadIdx.x / 32 * warp_elements; offset < chunk.size; offset += stride, bit <<= 1) {
        if (offset + warp_elements > chunk.size || !update_words<Octets, G, P, S>(f, chunk, offset, largest)) {
            left |= bit;
        }
    }
    return left;
}

// Stores a state, with stochastic rounding to bf16. Sets `x` to the stored values.
__device__ __forceinline__ void store_state(const Factors& f, void* base, bool bf16, int64_t first, float (&x)[octet],
                                            int count, bool whole, int64_t block, uint32_t stream) {
    if (bf16) {
        const PhiloxWords random = random_halves(block, f.seed, stream, f.step);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = __bfloat162float(stochastic_round_bf16(x[i], random.half(i)));
        }
    }
    store_octet(base, bf16, first, x, count, whole);
}

// Updates up to eight elements of any value, dtype and alignment.
__device__ __forceinline__ void update_octet(const Factors& f, const Chunk& chunk, int first, bool aligned,
                                             Largest& largest) {
    const ParamEntry& entry = chunk.entry;
    const int64_t block = chunk.block + first / octet;
    const int count = chunk.size - first;
    const bool whole = aligned && count >= octet;
    float g[octet], p[octet], m[octet], v[octet];
    load_octet(entry.grad, entry.flags & grad_bf16, first, g, count, whole);
    load_octet(entry.m, entry.flags & m_bf16, first, m, count, whole);
    load_octet(entry.v, entry.flags & v_bf16, first, v, count, whole);
    load_octet(entry.master, entry.flags & master_bf16, first, p, count, whole);
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        update(f, chunk.decay, g[i], p[i], m[i], v[i]);
    }
    store_state(f, entry.m, entry.flags & m_bf16, first, m, count, whole, block, entry.stream ^ m_stream);
    store_state(f, entry.v, entry.flags & v_bf16, first, v, count, whole, block, entry.stream ^ v_stream);
    store_state(f, entry.master, entry.flags & master_bf16, first, p, count, whole, block, entry.stream ^ master_stream);
    if (entry.copy != nullptr) {
        store_octet(entry.copy, entry.flags & copy_bf16, first, p, count, whole);
    }
    add_param(entry, p, count, largest);
}

// As `update_most`, for the dtypes of the tensor.
template <class Octets>
__device__ __forceinline__ uint32_t update_dtypes(const Factors& f, const Chunk& chunk, Largest& largest) {
    using Wide = float;
    using Half = __nv_bfloat16;
    switch (chunk.entry.flags & (grad_bf16 | master_bf16 | m_bf16 | v_bf16)) {
        case grad_bf16 | master_bf16 | m_bf16 | v_bf16:
            return update_most<Octets, Half, Half, Half>(f, chunk, largest);
        case master_bf16 | m_bf16 | v_bf16:
            return update_most<Octets, Wide, Half, Half>(f, chunk, largest);
        case grad_bf16 | m_bf16 | v_bf16:
            return update_most<Octets, Half, Wide, Half>(f, chunk, largest);
        case m_bf16 | v_bf16:
            return update_most<Octets, Wide, Wide, Half>(f, chunk, largest);
        case grad_bf16 | master_bf16:
            return update_most<Octets, Half, Half, Wide>(f, chunk, largest);
        case master_bf16:
            return update_most<Octets, Wide, Half, Wide>(f, chunk, largest);
        case grad_bf16:
            return update_most<Octets, Half, Wide, Wide>(f, chunk, largest);
        case 0:
            return update_most<Octets, Wide, Wide, Wide>(f, chunk, largest);
        default:  // moments of two dtypes
            return ~0u;
    }
}

// As `update_most`. Returns all bits if nothing can be updated so.
__device__ __forceinline__ uint32_t update_chunk(const Factors& f, const Chunk& chunk, bool aligned, Largest& largest) {
    if (!aligned || !f.in_range) {
        return ~0u;
    }
    return chunk.entry.flags & on_host ? update_dtypes<WholeSectors>(f, chunk, largest)
                                       : update_dtypes<OctetPerLane>(f, chunk, largest);
}

// Adds the elements of the param in a skipped step.
__device__ __forceinline__ void add_chunk(const Chunk& chunk, bool aligned, Largest& largest) {
    for (int offset = threadIdx.x * octet; offset < chunk.size; offset += stride) {
        const int count = chunk.size - offset;
        float p[octet];
        load_octet(chunk.entry.master, chunk.entry.flags & master_bf16, offset, p, count, aligned && count >= octet);
        add_param(chunk.entry, p, count, largest);
    }
}

__global__ void __launch_bounds__(threads)
    prepare_kernel(const ParamEntry* table, const float* clip_coef, const float* lr, const int32_t* step, const int64_t* seed,
                   int tensors, double beta1, double beta2, double epsilon, Factors* result) {
    if (threadIdx.x == 0) {
        *result = factors(*clip_coef, *lr, *step, *seed, beta1, beta2, epsilon);
    }
    clear_amaxes(table, tensors);
}

__global__ void __launch_bounds__(threads, blocks_per_sm)
    adamw_kernel(const ParamEntry* table, const Factors* prepared, int tensors, int64_t chunk_size) {
    const Factors f = *prepared;
    Chunk chunk;
    chunk.entry = entry_of(table, tensors, blockIdx.x);
    const ParamEntry& entry = chunk.entry;
    const int64_t begin = (blockIdx.x - entry.first_chunk) * chunk_size;
    chunk.entry.advance(begin, entry.flags & m_bf16 ? 2 : 4, entry.flags & v_bf16 ? 2 : 4);
    chunk.block = entry.block_of(begin);
    chunk.size = static_cast<int>(min(chunk_size, entry.size - begin));
    chunk.decay = decay_of(f, entry.weight_decay);
    const bool aligned = entry.is_aligned();
    Largest largest;
    if (isfinite(f.coef)) {
        uint32_t left = update_chunk(f, chunk, aligned, largest);
        for (int offset = threadIdx.x * octet; offset < chunk.size && left != 0; offset += stride, left >>= 1) {
            if (left & 1) {
                update_octet(f, chunk, offset, aligned, largest);
            }
        }
    } else if (entry.amax != nullptr) {
        add_chunk(chunk, aligned, largest);
    }
    store_amax(entry, largest);
}

}  // namespace

void adamw(const void* table, const void* clip_coef, const void* lr, const void* step, const void* seed, void* workspace,
           int64_t workspace_bytes, int64_t tensors, int64_t chunks, int64_t chunk_size, double beta1, double beta2,
           double epsilon, cudaStream_t stream) {
    check_pointer(table, op, "table", 8);
    check_pointer(clip_coef, op, "clip_coef", 4);
    check_pointer(lr, op, "lr", 4);
    check_pointer(step, op, "step", 4);
    check_pointer(seed, op, "seed", 8);
    check_pointer(workspace, op, "workspace", alignof(Factors));
    SUROGATE_REQUIRE(workspace_bytes >= int64_t{sizeof(Factors)}, op,
                     "workspace must have " + std::to_string(sizeof(Factors)) + " bytes, got " +
                         std::to_string(workspace_bytes));
    check_positive(tensors, op, "tensors");
    check_positive(chunks, op, "chunks");
    check_positive(chunk_size, op, "chunk_size");
    SUROGATE_REQUIRE((chunk_size & (chunk_size - 1)) == 0 && chunk_size >= octet && chunk_size <= max_chunk_size, op,
                     "chunk_size must be a power of two from 8 to " + std::to_string(max_chunk_size) + ", got " +
                         std::to_string(chunk_size));
    SUROGATE_REQUIRE(beta1 >= 0 && beta1 < 1, op, "beta1 must be in [0, 1), got " + std::to_string(beta1));
    SUROGATE_REQUIRE(beta2 >= 0 && beta2 < 1, op, "beta2 must be in [0, 1), got " + std::to_string(beta2));
    SUROGATE_REQUIRE(epsilon > 0, op, "epsilon must be positive, got " + std::to_string(epsilon));
    const ParamEntry* entries = static_cast<const ParamEntry*>(table);
    Factors* prepared = static_cast<Factors*>(workspace);
    const int count = to_int(tensors, op, "tensors");
    prepare_kernel<<<1, threads, 0, stream>>>(entries, static_cast<const float*>(clip_coef),
                                              static_cast<const float*>(lr), static_cast<const int32_t*>(step),
                                              static_cast<const int64_t*>(seed), count, beta1, beta2, epsilon,
                                              prepared);
    adamw_kernel<<<to_int(chunks, op, "chunks"), threads, 0, stream>>>(entries, prepared, count, chunk_size);
    check_launch(op);
}

}  // namespace surogate
