// LM head with cross-entropy, and its gradients, over labelled rows only.
//
//   logits, dx, dw   as in head_products.cpp
//   dlogits = (softmax(logits) - onehot) * loss_scale    with dx; softcap: cross_entropy.cuh
//   loss  (+)= loss_scale * sum over labelled rows of -log softmax(logits)[target]
//
// lm_head.h documents a run and the workspace.

#include "loss.h"

namespace surogate {
namespace {

constexpr const char* op_name = "lm_head_ce";

}  // namespace

LmHead::LmHead(const LossHeadShape& shape, const LossHeadBuffers& buffers, cudaStream_t stream)
    : LossHead(op_name, shape, buffers, stream) {}

void LmHead::chunk(int64_t index, cudaStream_t stream) {
    const HeadChunk c = products_.logits(index, stream);
    const HeadShape& head = shape_.head;
    if (!head.has_dx) {
        cross_entropy(c.logits, c.labels, row_loss(index), c.rows, head.vocab_size, c.ld, shape_.softcap, head.dtype,
                      stream);
        return;
    }
    cross_entropy_grads(c.logits, c.labels, b_.loss_scale, row_loss(index), c.rows, head.vocab_size, c.ld,
                        shape_.softcap, head.dtype, stream);
    products_.gradients(index, stream);
}

int64_t LmHead::workspace_bytes(const HeadShape& shape) { return LossHead::workspace_bytes(op_name, shape); }

}  // namespace surogate
