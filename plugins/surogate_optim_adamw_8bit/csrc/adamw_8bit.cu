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
// 31 KiB of shared memory; block i takes the chunks i, i + grid, ... A thread processes eight elements per iteration, and
// a warp a block of codes, so that its scale is a reduction of the warp. The first loop updates what
// `update_words` can: whole octets (for codes: whole blocks) in buffers that are all aligned to 16 bytes, with values in
// the usual range. The second loop updates the others, at less than half the speed. A maximum of bits is the same in any
// order.
//
// Bytes moved per element with codes (2.03 read and 2.03 written of moments and scales): 18.06 with fp32 gradient and
// master and a bf16 copy, 12.06 with fp32 gradient and bf16 master, 10.06 with both in bf16: floors of 4.24, 2.83 and
// 2.36 ms per 10^9 elements at 4.26 TB/s. Instructions per element, counted in the code for SM90: about 80 and, with a
// bf16 master, 85, of which 30 are the arithmetic, 24 the search of the codes, 12 their decoding and 6 the random bits. An
// SM issues 128 per clock, so at 1.5 GHz a bf16 master is limited to 3.6 TB/s with fp32 gradients, 3.0 with bf16. Not
// measured yet.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

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
constexpr int threads = 128;
constexpr int blocks_per_sm = 5;
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
    Entry entry;
    int64_t begin;
    int size;
    float decay;
};

__device__ __forceinline__ uint2 load_codes(const void* codes, int64_t first) {
    __builtin_assume(__isGlobal(codes));
    return *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(codes) + first);
}

__device__ __forceinline__ void store_codes(void* codes, int64_t first, uint2 x) {
    __builtin_assume(__isGlobal(codes));
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(codes) + first) = x;
}

// The moments of an octet as they are in memory.
struct WideMoments {
    Words<float> m, v;

    static __device__ __forceinline__ WideMoments load(const Entry& entry, int64_t first) {
        return {Words<float>::load(entry.m, first), Words<float>::load(entry.v, first)};
    }
    __device__ __forceinline__ void decode(const CodeTables&, float (&x)[octet], float (&y)[octet]) const {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = m.get(i), y[i] = v.get(i);
        }
    }
    static __device__ __forceinline__ bool store(const CodeTables&, const Entry& entry, int64_t first,
                                                 const float (&x)[octet], const float (&y)[octet], bool in_range) {
        if (in_range) {
            Words<float>::nearest(x).store(entry.m, first);
            Words<float>::nearest(y).store(entry.v, first);
        }
        return in_range;
    }
};

struct CodeMoments {
    uint2 m, v;
    float m_scale, v_scale;

    static __device__ __forceinline__ CodeMoments load(const Entry& entry, int64_t first) {
        const int64_t block = first / code_block;
        return {load_codes(entry.m, first), load_codes(entry.v, first), entry.m_scales[block], entry.v_scales[block]};
    }
    __device__ __forceinline__ void decode(const CodeTables& tables, float (&x)[octet], float (&y)[octet]) const {
        surogate::decode(tables.m, m, m_scale, x);
        surogate::decode(tables.v, v, v_scale, y);
    }
    // All threads of a warp store, or none. Called by whole warps.
    static __device__ __forceinline__ bool store(const CodeTables& tables, const Entry& entry, int64_t first,
                                                 const float (&x)[octet], const float (&y)[octet], bool in_range) {
        const Magnitudes<true> ms(x);
        const Magnitudes<false> vs(y);
        const float m_scale = ms.scale(), v_scale = vs.scale();
        if (!__all_sync(0xffffffffu, in_range && encodes(m_scale) && encodes(v_scale))) {
            return false;
        }
        store_codes(entry.m, first, encode(tables.m_entries, ms, m_scale));
        store_codes(entry.v, first, encode(tables.v_entries, vs, v_scale));
        if (threadIdx.x % 32 == 0) {
            entry.m_scales[first / code_block] = m_scale;
            entry.v_scales[first / code_block] = v_scale;
        }
        return true;
    }
};

// Updates eight elements and returns true, or writes nothing and returns false if one is not in range: with codes, one
// of the warp's.
template <class G, class P, class Moments>
__device__ __forceinline__ bool update_words(const Factors& f, const CodeTables& tables, const Chunk& chunk, int offset,
                                             Largest& largest) {
    const Entry& entry = chunk.entry;
    const int64_t first = chunk.begin + offset;
    const Words<G> g = Words<G>::load(entry.grad, first);
    const Moments old = Moments::load(entry, first);
    const Words<P> old_p = Words<P>::load(entry.master, first);
    float p[octet], m[octet], v[octet];
    old.decode(tables, m, v);
    bool in_range = true;
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        p[i] = old_p.get(i);
        update_moments(f, g.get(i), m[i], v[i]);
        in_range &= update_param_in_range(f, chunk.decay, m[i], v[i], p[i]);
    }
    if (!Moments::store(tables, entry, first, m, v, in_range)) {
        return false;
    }
    // A chunk does not cross a multiple of 2^32 blocks of eight.
    const int64_t origin = chunk.begin / octet;
    const uint32_t low = static_cast<uint32_t>(origin) + offset / octet;
    const uint32_t high = static_cast<uint32_t>(origin >> 32);
    // Keys that are not in `Factors` are computed where they are used, and need no registers in the loop.
    const auto random = [&](uint32_t stream) {
        return philox4x32_10(low, high, stream, static_cast<uint32_t>(f.step), philox_keys(f.seed));
    };
    const Words<P> new_p = Words<P>::rounded(p, random, entry.stream);
    new_p.store(entry.master, first);
    if (entry.copy == nullptr) {
        largest.add(new_p);
        return true;
    }
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        p[i] = new_p.get(i);
    }
    if (entry.flags & copy_bf16) {
        const auto copy = Words<__nv_bfloat16>::nearest(p);
        copy.store(entry.copy, first);
        largest.add(copy);
    } else {
        const auto copy = Words<float>::nearest(p);
        copy.store(entry.copy, first);
        largest.add(copy);
    }
    return true;
}

// Updates the octets of this thread that `update_words` can. Returns a bit for each of the others. A warp takes a block
// of codes at a time, of which only the last one of a tensor may not be whole.
template <class G, class P, class Moments>
__device__ __forceinline__ uint32_t update_most(const Factors& f, const CodeTables& tables, const Chunk& chunk,
                                                Largest& largest) {
    const int lane = threadIdx.x % 32 * octet;
    uint32_t left = 0, bit = 1;
    for (int base = threadIdx.x / 32 * code_block; base < chunk.size; base += stride, bit <<= 1) {
        if (base + code_block > chunk.size ||
            !update_words<G, P, Moments>(f, tables, chunk, base + lane, largest)) {
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
__device__ __forceinline__ void store_master(const Factors& f, const Entry& entry, int64_t first, float (&p)[octet],
                                             int count, bool whole) {
    const bool bf16 = entry.flags & master_bf16;
    if (bf16) {
        const PhiloxWords random = random_halves(first / octet, f.seed, entry.stream, f.step);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            p[i] = __bfloat162float(stochastic_round_bf16(p[i], random.half(i)));
        }
    }
    store(entry.master, bf16, first, p, count, whole);
}

// Updates up to eight elements of any value, dtype and alignment: none if `offset` is beyond the chunk. With codes, it is
// called by whole warps.
__device__ __forceinline__ void update_octet(const Factors& f, const CodeTables& tables, const Chunk& chunk, int offset,
                                             bool aligned, Largest& largest) {
    const Entry& entry = chunk.entry;
    const int64_t first = chunk.begin + offset, block = first / code_block;
    const int count = min(max(chunk.size - offset, 0), octet);
    const bool whole = aligned && count == octet, coded = entry.m_scales != nullptr;
    float g[octet], p[octet], m[octet], v[octet];
    load(entry.grad, entry.flags & grad_bf16, first, g, count, whole);
    load(entry.master, entry.flags & master_bf16, first, p, count, whole);
    if (coded) {
        decode(tables.m, load_codes(entry.m, first, count, zero_code), entry.m_scales[block], m);
        decode(tables.v, load_codes(entry.v, first, count, 0), entry.v_scales[block], v);
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
        store_codes(entry.m, first, encode_any(tables.m_entries, ms, m_scale), count);
        store_codes(entry.v, first, encode_any(tables.v_entries, vs, v_scale), count);
        if (threadIdx.x % 32 == 0) {
            entry.m_scales[block] = m_scale;
            entry.v_scales[block] = v_scale;
        }
    } else {
        store(entry.m, false, first, m, count, whole);
        store(entry.v, false, first, v, count, whole);
    }
    store_master(f, entry, first, p, count, whole);
    if (entry.copy != nullptr) {
        store(entry.copy, entry.flags & copy_bf16, first, p, count, whole);
    }
    add_param(entry, p, count, largest);
}

// As `update_most`, for the dtypes of the tensor.
__device__ __forceinline__ uint32_t update_chunk(const Factors& f, const CodeTables& tables, const Chunk& chunk,
                                                 bool aligned, Largest& largest) {
    using Wide = float;
    using Half = __nv_bfloat16;
    if (!aligned || !f.in_range) {
        return ~0u;
    }
    constexpr uint32_t coded = 1u << 31;
    const uint32_t moments = chunk.entry.m_scales != nullptr ? coded : 0;
    switch ((chunk.entry.flags & (grad_bf16 | master_bf16)) | moments) {
        case coded | grad_bf16 | master_bf16:
            return update_most<Half, Half, CodeMoments>(f, tables, chunk, largest);
        case coded | master_bf16:
            return update_most<Wide, Half, CodeMoments>(f, tables, chunk, largest);
        case coded | grad_bf16:
            return update_most<Half, Wide, CodeMoments>(f, tables, chunk, largest);
        case coded:
            return update_most<Wide, Wide, CodeMoments>(f, tables, chunk, largest);
        case grad_bf16 | master_bf16:
            return update_most<Half, Half, WideMoments>(f, tables, chunk, largest);
        case master_bf16:
            return update_most<Wide, Half, WideMoments>(f, tables, chunk, largest);
        case grad_bf16:
            return update_most<Half, Wide, WideMoments>(f, tables, chunk, largest);
        default:
            return update_most<Wide, Wide, WideMoments>(f, tables, chunk, largest);
    }
}

// Adds the elements of the param in a skipped step.
__device__ __forceinline__ void add_chunk(const Chunk& chunk, bool aligned, Largest& largest) {
    for (int offset = threadIdx.x * octet; offset < chunk.size; offset += stride) {
        const int count = chunk.size - offset;
        float p[octet];
        load(chunk.entry.master, chunk.entry.flags & master_bf16, chunk.begin + offset, p, count,
             aligned && count >= octet);
        add_param(chunk.entry, p, count, largest);
    }
}

// Chunk i belongs to the last tensor whose first chunk is at or before it. An empty tensor has the same first chunk as
// the next tensor.
__device__ __forceinline__ const Entry& entry_of(const Entry* table, int tensors, int chunk) {
    int begun = 0;
    for (int base = 0; base < tensors; base += threads) {
        const int i = base + threadIdx.x;
        begun += __syncthreads_count(i < tensors && table[i].first_chunk <= chunk);
    }
    return table[begun - 1];
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
    __shared__ CodeTables tables;
    __shared__ Entry shared;
    load_tables(tables, codes);
    const Factors f = *prepared;
    for (int index = blockIdx.x; index < chunks; index += gridDim.x) {
        const Entry& found = entry_of(table, tensors, index);  // the tables are filled, the last chunk is done
        if (threadIdx.x == 0) {
            shared = found;
        }
        __syncthreads();
        Chunk chunk;
        chunk.entry = shared;
        const Entry& entry = chunk.entry;
        chunk.begin = (index - entry.first_chunk) * chunk_size;
        chunk.size = static_cast<int>(min(static_cast<int64_t>(chunk_size), entry.size - chunk.begin));
        chunk.decay = decay_of(f, entry.weight_decay);
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
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, adamw_8bit_kernel, threads, 0), op);
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
    adamw_8bit_kernel<<<grid_size(whole), threads, 0, stream>>>(entries, static_cast<const uint32_t*>(codes), prepared,
                                                                count, whole, static_cast<int>(chunk_size));
    check_launch(op);
}

}  // namespace surogate
