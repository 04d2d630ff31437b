// The LM head for distillation: loss, cross-entropy and divergence from a teacher, and the gradients of x and w, over
// labelled rows only.
//
//   logits, dx, dw   as in head_products.cpp
//   dlogits          with dx, in place of the logits (teacher_logits.cu)
//   loss, cross_entropy, divergence
//               (+)= loss_scale * sum of the rows' (sum_loss)
//
// A run is begin, chunk 0, the further chunks that contain labelled rows, and end.
//
// Workspace: that of head_products.cpp | losses, cross-entropies and divergences of the rows, fp32 [3, tokens].

#include "lm_head_distill.h"

#include "loss.h"
#include "surogate/check.h"
#include "surogate/workspace.h"

namespace surogate {
namespace {

constexpr const char* op_name = "lm_head_distill";
constexpr int figures = 3;

int64_t figure_bytes(const HeadShape& shape) { return aligned(shape.tokens * 4); }

}  // namespace

LmHeadDistill::LmHeadDistill(const LmHeadDistillShape& shape, const LmHeadDistillBuffers& buffers, cudaStream_t stream)
    : shape_(shape),
      b_(buffers),
      products_(op_name, shape.head, buffers.head, stream),
      row_figures_(static_cast<char*>(buffers.head.workspace) + HeadProducts::workspace_bytes(op_name, shape.head)) {
    check_pointer(b_.ids, op_name, "ids", 4);
    check_pointer(b_.log_probs, op_name, "log_probs", 4);
    check_pointer(b_.loss_scale, op_name, "loss_scale", 4);
    check_pointer(b_.loss, op_name, "loss", 4);
    check_pointer(b_.cross_entropy, op_name, "cross_entropy", 4);
    check_pointer(b_.divergence, op_name, "divergence", 4);
}

float* LmHeadDistill::rows(int figure) const {
    return reinterpret_cast<float*>(row_figures_ + figure * figure_bytes(shape_.head));
}

void LmHeadDistill::begin(cudaStream_t stream) {
    products_.begin(stream);
    check_cuda(cudaMemsetAsync(row_figures_, 0, figures * figure_bytes(shape_.head), stream), op_name);
}

void LmHeadDistill::chunk(int64_t index, cudaStream_t stream) {
    const HeadChunk c = products_.logits(index, stream);
    const int64_t first = index * c.rows;
    distill(c.logits, c.row_index, c.labels, b_.ids, b_.log_probs, b_.loss_scale, rows(0) + first, rows(1) + first,
            rows(2) + first, c.rows, shape_.head.vocab_size, c.ld, shape_.k, shape_.weight, shape_.temperature,
            shape_.reverse, shape_.softcap, shape_.head.has_dx, shape_.head.dtype, stream);
    if (shape_.head.has_dx) {
        products_.gradients(index, stream);
    }
}

void LmHeadDistill::end(cudaStream_t stream) {
    void* const totals[figures] = {b_.loss, b_.cross_entropy, b_.divergence};
    for (int i = 0; i < figures; ++i) {
        sum_loss(rows(i), b_.loss_scale, totals[i], shape_.head.tokens, shape_.accumulate, stream);
    }
    products_.end(stream);
}

int64_t LmHeadDistill::workspace_bytes(const HeadShape& shape) {
    return HeadProducts::workspace_bytes(op_name, shape) + figures * figure_bytes(shape);
}

}  // namespace surogate
