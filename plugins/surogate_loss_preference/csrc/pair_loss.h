// Launchers of pair_loss.cu; what their arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void pair_loss(const float* sums, const float* labels, const float* scale, const float* reference, const float* margin,
               float* loss, float* chosen, float* rejected, float* gain, float* accuracy, float* more, int64_t pairs,
               int form, double beta, double smoothing, double gamma, double center, double nll, int adds,
               cudaStream_t stream);

void pair_loss_bwd(const float* d_loss, const float* sums, const float* labels, const float* scale,
                   const float* reference, const float* margin, float* d_sums, int64_t pairs, int form, double beta,
                   double smoothing, double gamma, double center, double nll, cudaStream_t stream);

}  // namespace surogate
