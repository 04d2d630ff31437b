// The LM head with cross-entropy by FP8 products. head_loss.cu documents the kernels, head.cpp the sequence of launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "surogate/lm_head.h"

namespace surogate {

// softcap: 0: none
void head_loss(const void* logits, const void* targets, void* row_loss, int64_t rows, int64_t vocab_size, int64_t ld,
               float softcap, cudaStream_t stream);

void head_loss_codes(void* logits, void* codes, const void* targets, const void* loss_scale, void* row_loss,
                     int64_t rows, int64_t vocab_size, int64_t ld, int64_t ld_codes, float softcap,
                     cudaStream_t stream);

void head_gradient_scale(const void* loss_scale, void* scale, cudaStream_t stream);

struct Fp8LmHeadShape {
    HeadShape head;        // with fp8
    float softcap;         // of the logits; 0: none
    bool accumulate_loss;  // loss +=
};

struct Fp8LmHeadBuffers {
    HeadBuffers head;
    const void* loss_scale;  // fp32 []
    void* loss;              // fp32 []
};

// Constructed as HeadProducts, with a workspace of Fp8LmHead::workspace_bytes. The constructor overwrites w_t and w_scale too.
class Fp8LmHead {
public:
    Fp8LmHead(const Fp8LmHeadShape& shape, const Fp8LmHeadBuffers& buffers, cudaStream_t stream);

    // A run calls begin, then chunk 0 and every further chunk that contains labels, in order, then end.
    void begin(cudaStream_t stream);
    void chunk(int64_t index, cudaStream_t stream);
    void end(cudaStream_t stream);
    std::string describe() const { return products_.describe(); }

    static int64_t workspace_bytes(const HeadShape& shape);

private:
    Fp8LmHeadShape shape_;
    const void* loss_scale_;
    void* loss_;
    HeadProducts products_;
    char* row_loss_;
};

}  // namespace surogate
