// The LM head for losses of tokens. token_logits.cu documents the kernels, lm_head_tokens.cpp the sequence of launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

namespace surogate {

struct LmHeadTokensShape {
    int64_t tokens, d_model, vocab_size, chunks;
    int dtype;              // dtype of x, w, logits and dx: BF16 or FP32
    bool has_dx;            // the backward pass: gradients in place of statistics
    bool has_dw;            // requires has_dx
    int dtype_dw;           // FP32 or BF16; ignored without has_dw
    bool accumulate_dw;     // dw +=, fp32 only
    int64_t library_bytes;  // workspace of cuBLASLt, a multiple of 256
    bool timed;             // algorithms of the products are chosen by timing; otherwise by cuBLASLt's heuristic
};

struct LmHeadTokensBuffers {
    const void* x;        // [tokens, d_model]
    void* w;              // [vocab_size, d_model]; only timing writes to it
    const void* targets;  // int32 [tokens]; negative: no label
    void* log_probs;      // fp32 [tokens]; its gradient, with has_dx
    void* logsumexp;      // fp32 [tokens]; read, with has_dx
    void* mean;           // fp32 [tokens]; its gradient, with has_dx
    void* d_logsumexp;    // fp32 [tokens]; null without has_dx
    void* dx;             // [tokens, d_model]; null without has_dx
    void* dw;             // [vocab_size, d_model]; null without has_dw
    void* workspace;      // LmHeadTokens::workspace_bytes(shape)
};

// Constructed and called as LmHead (loss.h).
class LmHeadTokens {
public:
    LmHeadTokens(const LmHeadTokensShape& shape, const LmHeadTokensBuffers& buffers, cudaStream_t stream);
    ~LmHeadTokens();
    LmHeadTokens(const LmHeadTokens&) = delete;
    LmHeadTokens& operator=(const LmHeadTokens&) = delete;

    void begin(cudaStream_t stream);
    void chunk(int64_t index, cudaStream_t stream);
    void end(cudaStream_t stream);

    static int64_t workspace_bytes(const LmHeadTokensShape& shape);

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace surogate
