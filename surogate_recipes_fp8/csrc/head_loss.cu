// Cross-entropy over rows of bf16 logits that writes the gradient in E5M2.
//
//   row_loss, and arguments    surogate/cross_entropy.cuh
//   codes[t, v] = E5M2(2^15 (softmax(logits)[t, v] - (v == targets[t])) slope)    0 where targets[t] < 0
//   logits[t, v] <- the same times loss_scale instead of 2^15, rounded to bf16    where codes have a buffer of their own
//   scale = loss_scale / 2^15                                                     head_gradient_scale
//
// slope is 1, with a softcap 1 - tanh(logit / softcap)^2. The magnitude of what is quantized is at most 1, so the scale
// needs no amax: 2^15 leaves E5M2 its whole range below, down to 2^-31, and a difference of 1 is exact.
//
// codes   [rows, vocab_size], row stride `ld_codes` bytes, aligned to 16 bytes. They may begin where the logits do, with
//         twice their stride: then nothing else is written.
// scale   fp32, read by products as (decode, encode); encode is not written
// vocab_size is a multiple of 16.
//
// Bytes moved per logit of a labelled row: 2 read, 1 written, and 2 more where the gradient is written in bf16 too. 1,024
// rows of 151,936 logits: 467 MB and 778 MB, 110 and 183 us at 4.26 TB/s. The two exponentials per logit take about 70 us.
// With a cap, or without clusters of thread blocks (SM89), up to 2 bytes more are read.

#include "surogate/cross_entropy.cuh"
#include "surogate/cross_entropy_cluster.cuh"

#include "fp8.cuh"
#include "head.h"
#include "surogate/lm_head.h"

namespace surogate {
namespace {

constexpr float gradient_encode = 32768.0f;

// beside: the codes have a buffer of their own, and the gradient in bf16 takes the place of the logits.
template <bool beside>
struct Codes {
    static constexpr bool has_gradient = true, shrinks = true;

    uint8_t* codes;
    int64_t ld;

    __device__ __forceinline__ float scale(float) const { return gradient_encode; }

    __device__ __forceinline__ void store(__nv_bfloat16* x, int64_t row, int64_t at, float (&values)[8],
                                          float loss_scale, int = 0) const {
        uint32_t bytes[2];
        quantize<E5M2>(values, 1.0f, bytes);
        uint8_t* to = beside ? codes + row * ld : reinterpret_cast<uint8_t*>(x);
        *reinterpret_cast<uint2*>(to + at) = make_uint2(bytes[0], bytes[1]);
        if constexpr (beside) {
#pragma unroll
            for (float& value : values) {
                value *= loss_scale * (1.0f / gradient_encode);
            }
            Vec<__nv_bfloat16>::from_float(values).store(x + at);
        }
    }
};

__global__ void gradient_scale_kernel(const float* loss_scale, float* scale) {
    *scale = *loss_scale * (1.0f / gradient_encode);
}

}  // namespace

void head_loss(const void* logits, const void* targets, void* row_loss, int64_t rows, int64_t vocab_size, int64_t ld,
               float softcap, cudaStream_t stream) {
    constexpr const char* op = "head_loss";
    check_logits(op, logits, targets, row_loss, rows, vocab_size, ld, BF16);
    launch_cross_entropy(static_cast<__nv_bfloat16*>(const_cast<void*>(logits)), targets, nullptr, row_loss,
                         LossAlone{}, rows, vocab_size, ld, softcap, op, stream);
}

void head_loss_codes(void* logits, void* codes, const void* targets, const void* loss_scale, void* row_loss,
                     int64_t rows, int64_t vocab_size, int64_t ld, int64_t ld_codes, float softcap,
                     cudaStream_t stream) {
    constexpr const char* op = "head_loss_codes";
    check_logits(op, logits, targets, row_loss, rows, vocab_size, ld, BF16);
    check_pointer(loss_scale, op, "loss_scale", 4);
    check_pointer(codes, op, "codes", 16);
    SUROGATE_REQUIRE(vocab_size % 16 == 0, op,
                     "vocab_size must be a multiple of 16, got " + std::to_string(vocab_size));
    SUROGATE_REQUIRE(ld_codes % 16 == 0 && (codes == logits ? ld_codes == 2 * ld : ld_codes >= vocab_size), op,
                     "ld_codes must be a multiple of 16 and at least vocab_size, in place of logits twice their ld, got " +
                         std::to_string(ld_codes));
    const auto run = [&](const auto& out) {
        if (softcap <= 0 && cluster_holds_row(vocab_size)) {
            launch_cross_entropy_in_cluster(logits, targets, loss_scale, row_loss, out, rows, vocab_size, ld, op,
                                            stream);
        } else {
            launch_cross_entropy(static_cast<__nv_bfloat16*>(logits), targets, loss_scale, row_loss, out, rows,
                                 vocab_size, ld, softcap, op, stream);
        }
    };
    auto* to = static_cast<uint8_t*>(codes);
    codes == logits ? run(Codes<false>{to, ld_codes}) : run(Codes<true>{to, ld_codes});
}

void head_gradient_scale(const void* loss_scale, void* scale, cudaStream_t stream) {
    constexpr const char* op = "head_gradient_scale";
    check_pointer(loss_scale, op, "loss_scale", 4);
    check_pointer(scale, op, "scale", 4);
    gradient_scale_kernel<<<1, 1, 0, stream>>>(static_cast<const float*>(loss_scale), static_cast<float*>(scale));
    check_launch(op);
}

}  // namespace surogate
