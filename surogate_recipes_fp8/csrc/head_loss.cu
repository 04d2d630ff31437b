// Cross-entropy over rows of bf16 logits that writes the gradient in E5M2.
//
//   row_loss, and arguments    surogate/cross_entropy.cuh
//   codes[t, v] = E5M2(2^15 (softmax(logits)[t, v] - (v == targets[t])) slope)    0 where targets[t] < 0
//   scale = loss_scale / 2^15                                                     head_gradient_scale
//
// slope is 1, with a softcap 1 - tanh(logit / softcap)^2. The magnitude of what is quantized is at most 1, so the scale
// needs no amax: 2^15 leaves E5M2 its whole range below, down to 2^-31, and a difference of 1 is exact.
//
// codes   [rows, vocab_size], in place of the logits, row stride 2 ld bytes
// scale   fp32, read by products as (decode, encode); encode is not written
// vocab_size is a multiple of 16.
//
// Bytes moved per logit of a labelled row: 2 read, 1 written. 1,024 rows of 151,936 logits: 467 MB, 110 us at 4.26 TB/s.
// The two exponentials per logit take about 70 us. With a cap, or without clusters of thread blocks (SM89), up to 2 bytes
// more are read.

#include "surogate/cross_entropy.cuh"
#include "surogate/cross_entropy_cluster.cuh"

#include "fp8.cuh"
#include "head.h"
#include "surogate/lm_head.h"

namespace surogate {
namespace {

constexpr float gradient_encode = 32768.0f;

struct Codes {
    static constexpr bool has_gradient = true, shrinks = true;

    __device__ __forceinline__ float scale(float) const { return gradient_encode; }

    __device__ __forceinline__ void store(__nv_bfloat16* x, int64_t, int64_t at, float (&values)[8], float,
                                          int = 0) const {
        uint32_t bytes[2];
        quantize<E5M2>(values, 1.0f, bytes);
        *reinterpret_cast<uint2*>(reinterpret_cast<uint8_t*>(x) + at) = make_uint2(bytes[0], bytes[1]);
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

void head_loss_codes(void* logits, const void* targets, const void* loss_scale, void* row_loss, int64_t rows,
                     int64_t vocab_size, int64_t ld, float softcap, cudaStream_t stream) {
    constexpr const char* op = "head_loss_codes";
    check_logits(op, logits, targets, row_loss, rows, vocab_size, ld, BF16);
    check_pointer(loss_scale, op, "loss_scale", 4);
    SUROGATE_REQUIRE(vocab_size % 16 == 0, op,
                     "vocab_size must be a multiple of 16, got " + std::to_string(vocab_size));
    if (softcap <= 0 && cluster_holds_row(vocab_size)) {
        launch_cross_entropy_in_cluster(logits, targets, loss_scale, row_loss, Codes{}, rows, vocab_size, ld, op,
                                        stream);
    } else {
        launch_cross_entropy(static_cast<__nv_bfloat16*>(logits), targets, loss_scale, row_loss, Codes{}, rows,
                             vocab_size, ld, softcap, op, stream);
    }
}

void head_gradient_scale(const void* loss_scale, void* scale, cudaStream_t stream) {
    constexpr const char* op = "head_gradient_scale";
    check_pointer(loss_scale, op, "loss_scale", 4);
    check_pointer(scale, op, "scale", 4);
    gradient_scale_kernel<<<1, 1, 0, stream>>>(static_cast<const float*>(loss_scale), static_cast<float*>(scale));
    check_launch(op);
}

}  // namespace surogate
