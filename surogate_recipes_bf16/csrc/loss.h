// LM head and cross-entropy. cross_entropy*.cu, token_logits.cu and teacher_logits.cu document the kernels, lm_head.cpp the
// sequence of launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "surogate/lm_head.h"

namespace surogate {

// softcap: 0: none
void cross_entropy(const void* logits, const void* targets, void* row_loss, int64_t rows, int64_t vocab_size,
                   int64_t ld, float softcap, int dtype, cudaStream_t stream);

void cross_entropy_grads(void* logits, const void* targets, const void* loss_scale, void* row_loss, int64_t rows,
                         int64_t vocab_size, int64_t ld, float softcap, int dtype, cudaStream_t stream);

// cross_entropy_grads for bf16 logits without a cap, where `cluster_holds_row` (cross_entropy_cluster.cu).
void cross_entropy_grads_in_cluster(void* logits, const void* targets, const void* loss_scale, void* row_loss,
                                    int64_t rows, int64_t vocab_size, int64_t ld, cudaStream_t stream);

void token_statistics(const void* logits, const void* row_index, const void* labels, void* log_probs, void* logsumexp,
                      void* mean, int64_t rows, int64_t vocab_size, int64_t ld, float softcap, int dtype,
                      cudaStream_t stream);

void token_logit_grads(void* logits, const void* row_index, const void* labels, const void* logsumexp,
                       const void* d_log_probs, const void* d_logsumexp, const void* d_mean, int64_t rows,
                       int64_t vocab_size, int64_t ld, float softcap, int dtype, cudaStream_t stream);

// Most tokens of a teacher, whose logits are in shared memory.
constexpr int64_t most_teacher_tokens = 8192;

void distill(void* logits, const void* row_index, const void* labels, const void* ids, const void* log_probs,
             const void* loss_scale, void* row_loss, void* row_cross_entropy, void* row_divergence, int64_t rows,
             int64_t vocab_size, int64_t ld, int64_t k, float weight, float temperature, bool reverse, float softcap,
             bool has_grads, int dtype, cudaStream_t stream);

// LM head with cross-entropy: lm_head.cpp.
class LmHead : public LossHead {
public:
    LmHead(const LossHeadShape& shape, const LossHeadBuffers& buffers, cudaStream_t stream);

    void chunk(int64_t index, cudaStream_t stream);

    static int64_t workspace_bytes(const HeadShape& shape);
};

}  // namespace surogate
