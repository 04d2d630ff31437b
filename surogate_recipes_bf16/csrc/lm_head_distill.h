// The LM head for distillation. teacher_logits.cu documents the kernel, lm_head_distill.cpp the sequence of launches.
#pragma once

#include "surogate/lm_head.h"

namespace surogate {

struct LmHeadDistillShape {
    HeadShape head;
    int64_t k;  // tokens of the teacher
    float weight, temperature, softcap;
    bool reverse;
    bool accumulate;  // loss, cross_entropy and divergence +=
};

struct LmHeadDistillBuffers {
    HeadBuffers head;
    const void* ids;         // int32 [tokens, k]
    const void* log_probs;   // fp32 [tokens, k + 1]
    const void* loss_scale;  // fp32 []
    void* loss;              // fp32 [], as those that follow
    void* cross_entropy;
    void* divergence;
};

// Constructed and called as LmHead (loss.h), with a workspace of LmHeadDistill::workspace_bytes.
class LmHeadDistill {
public:
    LmHeadDistill(const LmHeadDistillShape& shape, const LmHeadDistillBuffers& buffers, cudaStream_t stream);

    void begin(cudaStream_t stream);
    void chunk(int64_t index, cudaStream_t stream);
    void end(cudaStream_t stream);

    static int64_t workspace_bytes(const HeadShape& shape);

private:
    float* rows(int figure) const;

    LmHeadDistillShape shape_;
    LmHeadDistillBuffers b_;
    HeadProducts products_;
    char* row_figures_;
};

}  // namespace surogate
