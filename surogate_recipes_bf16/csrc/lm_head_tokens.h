// The LM head for losses of tokens. token_logits.cu documents the kernels, lm_head_tokens.cpp the sequence of launches.
#pragma once

#include "surogate/lm_head.h"

namespace surogate {

struct LmHeadTokensBuffers {
    HeadBuffers head;
    void* log_probs;    // fp32 [tokens]; its gradient, with has_dx
    void* logsumexp;    // fp32 [tokens]; read, with has_dx
    void* mean;         // fp32 [tokens]; its gradient, with has_dx
    void* d_logsumexp;  // fp32 [tokens]; null without has_dx
};

// Constructed and called as LmHead (loss.h). With has_dx it is the backward pass: gradients in place of statistics.
class LmHeadTokens {
public:
    // softcap: of the logits; 0: none
    LmHeadTokens(const HeadShape& shape, float softcap, const LmHeadTokensBuffers& buffers, cudaStream_t stream);

    void begin(cudaStream_t stream);
    void chunk(int64_t index, cudaStream_t stream);
    void end(cudaStream_t stream);

    static int64_t workspace_bytes(const HeadShape& shape);

private:
    HeadShape shape_;
    float softcap_;
    LmHeadTokensBuffers b_;
    HeadProducts products_;
};

}  // namespace surogate
