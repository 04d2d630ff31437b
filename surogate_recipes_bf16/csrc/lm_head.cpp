// LM head with cross-entropy, and its gradients, over labelled rows only.
//
//   logits, dx, dw   as in head_products.cpp
//   dlogits = (softmax(logits) - onehot) * loss_scale    with dx; softcap: cross_entropy.cuh
//   loss  (+)= loss_scale * sum over labelled rows of -log softmax(logits)[target]
//
// A run is begin, chunk 0, the further chunks that contain labelled rows, and end.
//
// Workspace: that of head_products.cpp | row losses fp32 [tokens].

#include "loss.h"
#include "surogate/check.h"
#include "surogate/workspace.h"

namespace surogate {
namespace {

constexpr const char* op_name = "lm_head_ce";

}  // namespace

LmHead::LmHead(const LmHeadShape& shape, const LmHeadBuffers& buffers, cudaStream_t stream)
    : shape_(shape),
      loss_scale_(buffers.loss_scale),
      loss_(buffers.loss),
      products_(op_name, shape.head, buffers.head, stream),
      row_loss_(static_cast<char*>(buffers.head.workspace) + HeadProducts::workspace_bytes(op_name, shape.head)) {
    check_pointer(loss_scale_, op_name, "loss_scale", 4);
    check_pointer(loss_, op_name, "loss", 4);
}

void LmHead::begin(cudaStream_t stream) {
    products_.begin(stream);
    check_cuda(cudaMemsetAsync(row_loss_, 0, shape_.head.tokens * 4, stream), op_name);
}

void LmHead::chunk(int64_t index, cudaStream_t stream) {
    const HeadChunk c = products_.logits(index, stream);
    void* losses = row_loss_ + index * c.rows * 4;
    if (!shape_.head.has_dx) {
        cross_entropy(c.logits, c.labels, losses, c.rows, shape_.head.vocab_size, c.ld, shape_.softcap,
                      shape_.head.dtype, stream);
        return;
    }
    cross_entropy_grads(c.logits, c.labels, loss_scale_, losses, c.rows, shape_.head.vocab_size, c.ld, shape_.softcap,
                        shape_.head.dtype, stream);
    products_.gradients(index, stream);
}

void LmHead::end(cudaStream_t stream) {
    sum_loss(row_loss_, loss_scale_, loss_, shape_.head.tokens, shape_.accumulate_loss, stream);
    products_.end(stream);
}

int64_t LmHead::workspace_bytes(const HeadShape& shape) {
    return HeadProducts::workspace_bytes(op_name, shape) + aligned(shape.tokens * 4);
}

}  // namespace surogate
