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
//   table      [tensors] entries of 13 int64 words (param_table.cuh): grad and master, each fp32 or bf16; m and v, both
//              uint8 codes or both fp32; optionally a work copy, fp32 or bf16, and an fp32 amax; for codes the scales of m
//              and v, fp32 [ceil(size / 256)], the largest magnitude of each block of 256 elements. Masters, moments and
//              scales are updated in place.
//   codes      the tables of codes.cuh: `kernels.code_words`
//   clip_coef, lr  fp32 scalars; step int32 scalar, 1 at the first step; seed int64 scalar; all in device memory
//   workspace      Factors, computed from the scalars by a launch of one block, which also sets every amax to 0
//
// Random bits of a bf16 master: Philox with the key `seed` and the counter (index of the eight elements in the whole param,
// stream of the param, step), as in philox.cuh.
//
// Any size. Pointers are aligned to their element. Grid: a block of 24 warps per multiprocessor, with the tables in 94 KiB of
// shared memory. Warp i takes the chunks i, i + warps of the grid, ... of up to 32 blocks of codes, so that lane j loads the
// scales of block j for all; it updates a block at a time, eight elements per lane. The first loop updates what
// `update_whole` can (whole_octets.cuh): whole blocks in buffers that are all aligned to 16 bytes, with values in the usual
// range. The second loop updates the others, at about a third of the speed: also blocks of codes with a moment that is 0 or
// below 2^-30 of the largest, so elements that never had a gradient. Warps do not wait for each other.
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
// Measured on an H200, Qwen3-8B with 12 blocks, two thirds of whose elements have codes, share of the 4.1 TB/s of a copy by
// gradient, master and work copy: 89 to 93 % bf16, bf16; 94 to 98 % fp32, bf16; 94 % bf16, fp32, bf16; 95 to 98 % with both in
// fp32. When every block of codes waited for its two scales, these were 65, 72, 74 and 79 %.
#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "adamw_8bit.h"
#include "any_octet.cuh"
#include "chunk.cuh"
#include "codes.cuh"
#include "element.cuh"
#include "surogate/check.h"
#include "surogate/param_table.cuh"
#include "surogate/shared_memory.h"
#include "whole_octets.cuh"

namespace surogate {
namespace {

constexpr const char* op = "adamw_8bit";
constexpr int threads = 768;
constexpr int warps = threads / 32;

// As `update_whole`, for the dtypes of the tensor.
template <class Octets>
__device__ __forceinline__ uint32_t update_dtypes(const Factors& f, const TableAddresses& tables, const Chunk& chunk,
                                                  Largest& largest) {
    using Wide = float;
    using Half = __nv_bfloat16;
    constexpr uint32_t coded = 1u << 31;
    const uint32_t moments = chunk.entry.is_coded() ? coded : 0;
    switch ((chunk.entry.flags & (grad_bf16 | master_bf16)) | moments) {
        case coded | grad_bf16 | master_bf16:
            return update_whole<Octets, Half, Half>(f, tables, chunk, largest);
        case coded | master_bf16:
            return update_whole<Octets, Wide, Half>(f, tables, chunk, largest);
        case coded | grad_bf16:
            return update_whole<Octets, Half, Wide>(f, tables, chunk, largest);
        case coded:
            return update_whole<Octets, Wide, Wide>(f, tables, chunk, largest);
        case grad_bf16 | master_bf16:
            return update_whole<Octets, Half, Half>(f, chunk, largest);
        case master_bf16:
            return update_whole<Octets, Wide, Half>(f, chunk, largest);
        case grad_bf16:
            return update_whole<Octets, Half, Wide>(f, chunk, largest);
        default:
            return update_whole<Octets, Wide, Wide>(f, chunk, largest);
    }
}

// As `update_whole`. Returns all bits if nothing can be updated so.
__device__ __forceinline__ uint32_t update_most(const Factors& f, const TableAddresses& tables, const Chunk& chunk,
                                                bool aligned, Largest& largest) {
    if (!aligned || !f.in_range || !isfinite(chunk.decay)) {
        return ~0u;
    }
    return chunk.entry.flags & on_host ? update_dtypes<WholeSectors>(f, tables, chunk, largest)
                                       : update_dtypes<OctetPerLane>(f, tables, chunk, largest);
}

// Adds the elements of the param in a skipped step.
__device__ __forceinline__ void add_chunk(const Chunk& chunk, bool aligned, Largest& largest) {
    for (int first = threadIdx.x % 32 * octet; first < chunk.size; first += code_block) {
        const int count = chunk.size - first;
        float p[octet];
        load_octet(chunk.entry.master, chunk.entry.flags & master_bf16, first, p, count, aligned && count >= octet);
        add_param(chunk.entry, p, count, largest);
    }
}

__global__ void __launch_bounds__(threads)
    prepare_kernel(const Entry* table, const float* clip_coef, const float* lr, const int32_t* step, const int64_t* seed,
                   int tensors, double beta1, double beta2, double epsilon, Factors* result) {
    if (threadIdx.x == 0) {
        *result = factors(*clip_coef, *lr, *step, *seed, beta1, beta2, epsilon);
    }
    clear_amaxes(table, tensors);
}

__global__ void __launch_bounds__(threads)
    adamw_8bit_kernel(const Entry* table, const uint32_t* codes, const Factors* prepared, int tensors, int chunks,
                      int chunk_size) {
    extern __shared__ CodeTables code_tables[];
    load_tables(*code_tables, codes);
    __syncthreads();
    const TableAddresses tables(*code_tables);
    const Factors f = *prepared;
    for (int index = blockIdx.x * warps + threadIdx.x / 32; index < chunks; index += gridDim.x * warps) {
        const Chunk chunk = chunk_of(f, entry_of(table, tensors, index), index, chunk_size);
        const Entry& entry = chunk.entry;
        const bool aligned = entry.is_aligned();
        Largest largest;
        if (isfinite(f.coef)) {
            uint32_t left = update_most(f, tables, chunk, aligned, largest);
            for (int base = 0; base < chunk.size && left != 0; base += code_block, left >>= 1) {
                if (left & 1) {
                    update_any_octet(f, tables, chunk, base + threadIdx.x % 32 * octet, aligned, largest);
                }
            }
        } else if (entry.amax != nullptr) {
            add_chunk(chunk, aligned, largest);
        }
        store_amax(entry, largest);
    }
}

int grid_size(int chunks) {
    int device = 0, multiprocessors = 0, blocks = 0;
    check_cuda(cudaGetDevice(&device), op);
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), op);
    const int bytes = sizeof(CodeTables);
    allow_shared_memory(adamw_8bit_kernel, bytes, op);
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, adamw_8bit_kernel, threads, bytes), op);
    return static_cast<int>(std::min<int64_t>(multiprocessors * blocks, ceil_div(chunks, warps)));
}

}  // namespace

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
    SUROGATE_REQUIRE(workspace_bytes >= int64_t{sizeof(Factors)}, op,
                     "workspace must have " + std::to_string(sizeof(Factors)) + " bytes, got " +
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
