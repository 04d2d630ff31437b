// Launchers of token_loss.cu; what their arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void token_loss(const float* log_probs, const float* logsumexp, const float* mean_logit, const float* scale,
                const float* weights, float* loss, float* z_loss, float* cross_entropy, int64_t tokens, double smoothing,
                double z, int adds, cudaStream_t stream);

void token_loss_bwd(const float* logsumexp, const float* scale, const float* d_loss, const float* d_z_loss,
                    const float* d_cross_entropy, const float* weights, float* d_log_probs, float* d_logsumexp,
                    float* d_mean_logit, int64_t tokens, double smoothing, double z, cudaStream_t stream);

}  // namespace surogate
