// LM head with cross-entropy by FP8 products, and its gradients, over labelled rows only.
//
//   x_c                      E4M3, by the largest magnitude of the rows of the chunk
//   logits = x_c w^T         E4M3 x E4M3, rounded to bf16
//   dlogits                  E5M2: head_loss.cu
//   dx[rows] = dlogits w     E5M2 x E4M3, rounded to bf16; 0 for unlabelled rows
//   dw     (+)= dlogits^T x_c  E5M2 x E4M3, of transposed codes
//   loss   (+)= loss_scale * sum over labelled rows of -log softmax(logits)[target]
//
// If a labelled row of x is not finite, so is the loss (fp8.cuh).
//
// lm_head.h documents a run and the workspace. Launches besides those of LossHead and head_products.cpp: 2 and a memset
// per chunk for the codes of x, which move 5 bytes per element, 1 for the loss, 1 for the transposed codes of dlogits, and
// 1 in chunk 0.

#include "head.h"

#include "quantize.h"
#include "surogate/check.h"
#include "surogate/dtype.h"

namespace surogate {
namespace {

constexpr const char* op_name = "fp8_lm_head_ce";

}  // namespace

Fp8LmHead::Fp8LmHead(const LossHeadShape& shape, const LossHeadBuffers& buffers, cudaStream_t stream)
    : LossHead(op_name, shape, buffers, stream) {
    SUROGATE_REQUIRE(shape.head.fp8, op_name, "the head must have FP8 products");
}

void Fp8LmHead::chunk(int64_t index, cudaStream_t stream) {
    const HeadShape& head = shape_.head;
    const HeadChunk c = products_.gather(index, stream);
    const Scale scale{kCurrent, nullptr, nullptr, static_cast<float*>(c.x_scale), static_cast<float*>(c.measured)};
    fp8_quantize(c.x, c.x_codes, c.x_codes_t, {}, {c.rows, head.d_model}, BF16, E4M3, scale, stream);
    products_.multiply(stream);
    if (!head.has_dx) {
        head_loss(c.logits, c.labels, row_loss(index), c.rows, head.vocab_size, c.ld, shape_.softcap, stream);
        return;
    }
    if (index == 0) {  // which always runs, and first
        head_gradient_scale(b_.loss_scale, c.gradient_scale, stream);
    }
    head_loss_codes(c.logits, c.labels, b_.loss_scale, row_loss(index), c.rows, head.vocab_size, c.ld, shape_.softcap,
                    stream);
    if (head.has_dw) {
        fp8_transpose(c.logits, c.gradient_codes_t, {c.rows, head.vocab_size}, 2 * c.ld, stream);
    }
    products_.gradients(index, stream);
}

int64_t Fp8LmHead::workspace_bytes(const HeadShape& shape) { return LossHead::workspace_bytes(op_name, shape); }

}  // namespace surogate
