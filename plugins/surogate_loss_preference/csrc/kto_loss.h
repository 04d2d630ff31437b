// Launchers of kto_loss.cu; what their arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void kto_loss(const float* sums, const float* labels, const float* scale, const float* reference,
              const float* desirable, const float* mean_log_ratio, float* loss, float* log_ratio, float* kl,
              float* signed_reward, float* accuracy, float* by_label, int64_t answers, double beta,
              double desirable_weight, double undesirable_weight, int adds, cudaStream_t stream);

void kto_loss_bwd(const float* d_loss, const float* sums, const float* labels, const float* scale,
                  const float* reference, const float* desirable, const float* mean_log_ratio, float* d_sums,
                  int64_t answers, double beta, double desirable_weight, double undesirable_weight, cudaStream_t stream);

}  // namespace surogate
