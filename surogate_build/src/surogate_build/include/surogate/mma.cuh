// Instructions of tensor cores and asynchronous copies of the SM80 and later, in bf16.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace surogate {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads 16 bytes of rows that are read once: the L1 cache does not keep them, and the L2 cache reads 128 bytes.
template <class Words>
__device__ __forceinline__ Words load_once(const void* from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from));
    Words out;
    memcpy(&out, &words, sizeof(out));
    return out;
}

// Copies 16 or 4 bytes to shared memory, or fills them with zeros and reads nothing. Both addresses are aligned to as many.
template <int Bytes = 16>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool exists) {
    static_assert(Bytes == 16 || Bytes == 4);
    if constexpr (Bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                     "r"(exists ? 16 : 0)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(exists ? 4 : 0)
                     : "memory");
    }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of the committed groups of this thread have not arrived.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Loads four matrices of 8 x 8: lanes 0 to 7 have the addresses of the rows of the first one, and so on. Lane l gets elements
// 2 (l % 4) and the next of row l / 4; with `Transposed`, of column l / 4.
template <bool Transposed>
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const void* row) {
    if constexpr (Transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(shared_address(row))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                     : "r"(shared_address(row))
                     : "memory");
    }
}

// Transposes a matrix of 8 x 8. Lane l has and gets elements 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// sum [16,8] += a [16,16] b [16,8]. Lane l has elements 2 (l % 4) and the next of rows l / 4 and l / 4 + 8 of the sum.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace surogate
