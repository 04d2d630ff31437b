// The LM head for losses of tokens: statistics of the logits of each label, and the gradients of x and w, over labelled
// rows only.
//
//   logits, dx, dw   as in head_products.cpp
//   forward          log_probs, logsumexp, mean of the rows (token_statistics); 0 for unlabelled rows
//   backward         dlogits in place of the logits (token_logit_grads)
//
// A run is begin, chunk 0, the further chunks that contain labelled rows, and end. Both passes compute the logits.

#include "lm_head_tokens.h"

#include "loss.h"
#include "surogate/check.h"

namespace surogate {
namespace {

constexpr const char* op_name = "lm_head_tokens";

}  // namespace

LmHeadTokens::LmHeadTokens(const HeadShape& shape, float softcap, const LmHeadTokensBuffers& buffers,
                           cudaStream_t stream)
    : shape_(shape), softcap_(softcap), b_(buffers), products_(op_name, shape, buffers.head, stream) {
    check_pointer(b_.log_probs, op_name, "log_probs", 4);
    check_pointer(b_.logsumexp, op_name, "logsumexp", 4);
    check_pointer(b_.mean, op_name, "mean", 4);
    if (shape.has_dx) {
        check_pointer(b_.d_logsumexp, op_name, "d_logsumexp", 4);
    }
}

void LmHeadTokens::begin(cudaStream_t stream) {
    products_.begin(stream);
    if (shape_.has_dx) {
        return;
    }
    for (void* out : {b_.log_probs, b_.logsumexp, b_.mean}) {
        check_cuda(cudaMemsetAsync(out, 0, shape_.tokens * 4, stream), op_name);
    }
}

void LmHeadTokens::chunk(int64_t index, cudaStream_t stream) {
    const HeadChunk c = products_.logits(index, stream);
    if (!shape_.has_dx) {
        token_statistics(c.logits, c.row_index, c.labels, b_.log_probs, b_.logsumexp, b_.mean, c.rows,
                         shape_.vocab_size, c.ld, softcap_, shape_.dtype, stream);
        return;
    }
    token_logit_grads(c.logits, c.row_index, c.labels, b_.logsumexp, b_.log_probs, b_.d_logsumexp, b_.mean, c.rows,
                      shape_.vocab_size, c.ld, softcap_, shape_.dtype, stream);
    products_.gradients(index, stream);
}

void LmHeadTokens::end(cudaStream_t stream) { products_.end(stream); }

int64_t LmHeadTokens::workspace_bytes(const HeadShape& shape) { return HeadProducts::workspace_bytes(op_name, shape); }

}  // namespace surogate
