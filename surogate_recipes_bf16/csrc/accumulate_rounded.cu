// accumulate_rounded: sum = total + addend in fp32, rounded stochastically to bf16.
//
//   addend  [size] fp32 or bf16
//   total   [size] bf16
//   sum     [size] bf16, written; may be the same buffer as `total`
//   micro_step    int32 scalar, seed int64 scalar, in device memory, because a captured graph must not contain their values
//   stream_id  identifies the value; with seed, micro_step and element index it determines the 16 random bits (philox.cuh)
//   first   element of the whole value that the buffers begin with, a multiple of 8: 0 unless they are a part of it
//
// Any size. Pointers are aligned to their element; accesses are 16 bytes wide if all three pointers are aligned to 16
// bytes. Bit-identical to `surogate_core.reference.ops:accumulate_rounded`.
// Grid: one thread per eight elements, which use one Philox call. Bytes moved per element: 8 (fp32 addend) or 6 (bf16).
// Expected: 85-90 % of bandwidth; a Philox call costs about 12 instructions per element.
#include <cuda_bf16.h>

#include <cstdint>

#include "reductions.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"
#include "surogate/philox.cuh"

namespace surogate {
namespace {

constexpr const char* op = "accumulate_rounded";
constexpr int threads = 256;

// No __restrict__, because `sum` may be `total`. Each thread reads its eight elements before it writes them.
template <class T>
__global__ void __launch_bounds__(threads)
    accumulate_rounded_kernel(const T* addend, const __nv_bfloat16* total, __nv_bfloat16* sum, const int32_t* micro_step,
                              const int64_t* seed, uint32_t stream_id, int64_t first_block, int64_t size, bool aligned) {
    const int64_t block = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    const int64_t begin = block * octet;
    const int64_t count = size - begin;
    if (count <= 0) {
        return;
    }
    const bool whole = aligned && count >= octet;
    float a[octet], t[octet];
    load_octet(addend + begin, a, count, whole);
    load_octet(total + begin, t, count, whole);
    const PhiloxWords random = random_halves(first_block + block, *seed, stream_id, *micro_step);
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        t[i] = __bfloat162float(stochastic_round_bf16(t[i] + a[i], random.half(i)));
    }
    store_octet(sum + begin, t, count, whole);  // exact: the values are bf16 numbers
}

}  // namespace

void accumulate_rounded(const void* addend, const void* total, void* sum, const void* micro_step, const void* seed,
                        int64_t stream_id, int64_t first, int64_t size, int addend_dtype, cudaStream_t stream) {
    SUROGATE_REQUIRE(addend_dtype == FP32 || addend_dtype == BF16, op,
                     std::string("addend must be fp32 or bf16, got ") + name_of(addend_dtype));
    check_pointer(addend, op, "addend", bytes_of(addend_dtype));
    check_pointer(total, op, "total", 2);
    check_pointer(sum, op, "sum", 2);
    check_pointer(micro_step, op, "micro_step", 4);
    check_pointer(seed, op, "seed", 8);
    SUROGATE_REQUIRE(first >= 0 && first % octet == 0, op,
                     "first must be a multiple of 8 and not negative, got " + std::to_string(first));
    check_positive(size, op, "size");
    const int grid = to_int(ceil_div(size, octet * threads), op, "size / 2048");
    const bool aligned = is_aligned(addend, 16) && is_aligned(total, 16) && is_aligned(sum, 16);
    const auto launch = [&](auto type) {
        using T = decltype(type);
        accumulate_rounded_kernel<<<grid, threads, 0, stream>>>(
            static_cast<const T*>(addend), static_cast<const __nv_bfloat16*>(total), static_cast<__nv_bfloat16*>(sum),
            static_cast<const int32_t*>(micro_step), static_cast<const int64_t*>(seed), static_cast<uint32_t>(stream_id),
            first / octet, size, aligned);
    };
    addend_dtype == FP32 ? launch(float{}) : launch(__nv_bfloat16{});
    check_launch(op);
}

}  // namespace surogate
