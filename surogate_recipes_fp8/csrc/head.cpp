// LM head with cross-entropy by FP8 products, and its gradients, over labelled rows only.
//
//   x_c                      E4M3, by the largest magnitude of the rows of the chunk
//   logits = x_c w^T         E4M3 x E4M3, rounded to bf16
//   dlogits                  E5M2, and bf16 for dw: head_loss.cu
//   dx[rows] = dlogits w     E5M2 x E4M3, rounded to bf16; 0 for unlabelled rows
//   dw     (+)= dlogits^T x_c  bf16 operands
//   loss   (+)= loss_scale * sum over labelled rows of -log softmax(logits)[target]
//
// A run is begin, chunk 0, the further chunks that contain labelled rows, and end. If a labelled row of x is not finite, so
// is the loss (fp8.cuh).
//
// Workspace: that of head_products.cpp | row losses fp32 [tokens].
//
// Launches besides those of head_products.cpp: 1 in begin; 2 and a memset per chunk for the codes of x, which move 5 bytes
// per element, 1 for the loss; 1 in end, and 1 in chunk 0.

#include "head.h"

#include "quantize.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/workspace.h"

namespace surogate {
namespace {

constexpr const char* op_name = "fp8_lm_head_ce";

}  // namespace

Fp8LmHead::Fp8LmHead(const Fp8LmHeadShape& shape, const Fp8LmHeadBuffers& buffers, cudaStream_t stream)
    : shape_(shape),
      loss_scale_(buffers.loss_scale),
      loss_(buffers.loss),
      products_(op_name, shape.head, buffers.head, stream),
      row_loss_(static_cast<char*>(buffers.head.workspace) + HeadProducts::workspace_bytes(op_name, shape.head)) {
    SUROGATE_REQUIRE(shape.head.fp8, op_name, "the head must have FP8 products");
    check_pointer(loss_scale_, op_name, "loss_scale", 4);
    check_pointer(loss_, op_name, "loss", 4);
}

void Fp8LmHead::begin(cudaStream_t stream) {
    products_.begin(stream);
    check_cuda(cudaMemsetAsync(row_loss_, 0, shape_.head.tokens * 4, stream), op_name);
}

void Fp8LmHead::chunk(int64_t index, cudaStream_t stream) {
    const HeadChunk c = products_.gather(index, stream);
    const Scale scale{kCurrent, nullptr, nullptr, static_cast<float*>(c.x_scale), static_cast<float*>(c.measured)};
    fp8_quantize(c.x, c.x_codes, nullptr, {}, {c.rows, shape_.head.d_model}, BF16, E4M3, scale, stream);
    products_.multiply(stream);
    void* losses = row_loss_ + index * c.rows * 4;
    if (!shape_.head.has_dx) {
        head_loss(c.logits, c.labels, losses, c.rows, shape_.head.vocab_size, c.ld, shape_.softcap, stream);
        return;
    }
    if (index == 0) {  // which always runs, and first
        head_gradient_scale(loss_scale_, c.gradient_scale, stream);
    }
    head_loss_codes(c.logits, c.gradient_codes, c.labels, loss_scale_, losses, c.rows, shape_.head.vocab_size, c.ld,
                    c.ld_codes, shape_.softcap, stream);
    products_.gradients(index, stream);
}

void Fp8LmHead::end(cudaStream_t stream) {
    sum_loss(row_loss_, loss_scale_, loss_, shape_.head.tokens, shape_.accumulate_loss, stream);
    products_.end(stream);
}

int64_t Fp8LmHead::workspace_bytes(const HeadShape& shape) {
    return HeadProducts::workspace_bytes(op_name, shape) + aligned(shape.tokens * 4);
}

}  // namespace surogate
