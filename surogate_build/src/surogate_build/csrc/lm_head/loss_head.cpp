#include "surogate/check.h"
#include "surogate/lm_head.h"
#include "surogate/workspace.h"

namespace surogate {

LossHead::LossHead(const char* op, const LossHeadShape& shape, const LossHeadBuffers& buffers, cudaStream_t stream)
    : shape_(shape),
      b_(buffers),
      products_(op, shape.head, buffers.head, stream),
      row_loss_(static_cast<char*>(buffers.head.workspace) + HeadProducts::workspace_bytes(op, shape.head)) {
    check_pointer(b_.loss_scale, op, "loss_scale", 4);
    check_pointer(b_.loss, op, "loss", 4);
}

void LossHead::begin(cudaStream_t stream) {
    products_.begin(stream);
    check_cuda(cudaMemsetAsync(row_loss_, 0, shape_.head.tokens * 4, stream), "lm_head");
}

void* LossHead::row_loss(int64_t index) const {
    return row_loss_ + index * (shape_.head.tokens / shape_.head.chunks) * 4;
}

void LossHead::end(cudaStream_t stream) {
    sum_loss(row_loss_, b_.loss_scale, b_.loss, shape_.head.tokens, shape_.accumulate_loss, stream);
    products_.end(stream);
}

int64_t LossHead::workspace_bytes(const char* op, const HeadShape& shape) {
    return HeadProducts::workspace_bytes(op, shape) + aligned(shape.tokens * 4);
}

}  // namespace surogate
