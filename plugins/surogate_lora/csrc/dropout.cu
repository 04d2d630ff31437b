// lora_dropout: y[i] = 0 where the 16 random bits of element i are below `dropped`, else scale * x[i].
//
//   x, y        [size] fp32 or bf16, alike. The product is in fp32, rounded once. y may be x itself; nothing accumulates.
//   micro_step, seed  int32 and int64 scalars in device memory, read when the kernel runs: a captured launch draws anew
//   first       index of x[0] in the whole matrix that x has rows of, a multiple of 8
//   dropped     of 2^16 equally likely draws, 1 to 2^16 - 1
//
// Random bits as everywhere (philox.cuh): the key `seed`, the counter (index of the eight elements in the whole
// matrix, random_stream, micro_step).
// They are drawn again wherever the same elements are dropped, forward, backward and in recomputation: no mask is kept.
// The bits of `surogate_lora.reference:lora_dropout`.
//
// Pointers are aligned to their element; 16-byte accesses where both begin at a multiple of 16 bytes, but for what is
// left of eight at the end. A thread takes eight elements, one Philox call.
// Bytes: 4 an element in bf16, 8 in fp32; at 4.8 TB/s no faster than 14 us for [8192, 2048] in bf16. Some 230
// instructions for eight elements (in PTX), more than half of them Philox's: on an H200 they take about as long as the
// memory in bf16, half as long in fp32. 80 % of the bandwidth expected in fp32, less in bf16.
#include "dropout.h"

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"
#include "surogate/philox.cuh"

namespace surogate {
namespace {

constexpr const char* op = "lora_dropout";
constexpr int threads = 256;
constexpr int64_t draws = 1 << 16;

template <class T>
__global__ void __launch_bounds__(threads)
    lora_dropout_kernel(const T* x, const int32_t* micro_step, const int64_t* seed, T* y, int64_t size, int64_t first_block,
                        int64_t random_stream, int dropped, float scale, bool aligned) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    const int64_t first = index * octet;
    if (first >= size) {
        return;
    }
    const int64_t count = size - first;
    const bool whole = aligned && count >= octet;
    float values[octet];
    load_octet(x + first, values, count, whole);
    const PhiloxWords random = random_halves(first_block + index, *seed, random_stream, *micro_step);
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        values[i] = random.half(i) >= dropped ? __fmul_rn(scale, values[i]) : 0.0f;
    }
    store_octet(y + first, values, count, whole);
}

template <class T>
void launch(const void* x, const void* micro_step, const void* seed, void* y, int64_t size, int64_t first,
            int64_t random_stream, int64_t dropped, double scale, cudaStream_t stream) {
    check_pointer(x, op, "x", sizeof(T));
    check_pointer(y, op, "y", sizeof(T));
    const int blocks = to_int(ceil_div(size, octet * threads), op, "size / 2048");
    const bool aligned = is_aligned(x, 16) && is_aligned(y, 16);
    lora_dropout_kernel<<<blocks, threads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const int32_t*>(micro_step), static_cast<const int64_t*>(seed),
        static_cast<T*>(y), size, first / octet, random_stream, static_cast<int>(dropped), static_cast<float>(scale), aligned);
    check_launch(op);
}

}  // namespace

void lora_dropout(const void* x, const void* micro_step, const void* seed, void* y, int64_t size, int64_t first,
                  int64_t random_stream, int64_t dropped, double scale, int dtype, cudaStream_t stream) {
    check_positive(size, op, "size");
    SUROGATE_REQUIRE(first >= 0 && first % octet == 0, op,
                     "first must be a multiple of 8, got " + std::to_string(first));
    check_pointer(micro_step, op, "micro_step", 4);
    check_pointer(seed, op, "seed", 8);
    SUROGATE_REQUIRE(dropped > 0 && dropped < draws, op,
                     "dropped must be between 0 and 65536, got " + std::to_string(dropped));
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, std::string("x must be fp32 or bf16, not ") + name_of(dtype));
    if (dtype == FP32) {
        launch<float>(x, micro_step, seed, y, size, first, random_stream, dropped, scale, stream);
    } else {
        launch<__nv_bfloat16>(x, micro_step, seed, y, size, first, random_stream, dropped, scale, stream);
    }
}

}  // namespace surogate
