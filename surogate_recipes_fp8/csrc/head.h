// The LM head with cross-entropy by FP8 products. head_loss.cu documents the kernels, head.cpp the sequence of launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "surogate/lm_head.h"

namespace surogate {

// softcap: 0: none
void head_loss(const void* logits, const void* targets, void* row_loss, int64_t rows, int64_t vocab_size, int64_t ld,
               float softcap, cudaStream_t stream);

void head_loss_codes(void* logits, const void* targets, const void* loss_scale, void* row_loss, int64_t rows,
                     int64_t vocab_size, int64_t ld, float softcap, cudaStream_t stream);

void head_gradient_scale(const void* loss_scale, void* scale, cudaStream_t stream);

// Constructed as LossHead, of a shape with fp8. The constructor overwrites w_t and w_scale too.
class Fp8LmHead : public LossHead {
public:
    Fp8LmHead(const LossHeadShape& shape, const LossHeadBuffers& buffers, cudaStream_t stream);

    void chunk(int64_t index, cudaStream_t stream);

    static int64_t workspace_bytes(const HeadShape& shape);
};

}  // namespace surogate
