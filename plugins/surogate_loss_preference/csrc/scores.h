// Launchers of scores.cu; what their arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void document_scores(const void* x, const void* weight, const int32_t* tokens, const int32_t* groups, float* scores,
                     float* used, int64_t n_tokens, int64_t width, int64_t documents, int64_t padding, int dtype,
                     int weight_dtype, cudaStream_t stream);

void document_scores_dgrad(const float* d_scores, const void* weight, const int32_t* tokens, const int32_t* groups,
                           void* dx, int64_t n_tokens, int64_t width, int64_t documents, int64_t padding,
                           int weight_dtype, int dx_dtype, cudaStream_t stream);

void document_scores_wgrad(const float* d_scores, const void* x, const int32_t* tokens, const int32_t* groups, void* dw,
                           int64_t n_tokens, int64_t width, int64_t documents, int64_t padding, int dtype, int dw_dtype,
                           bool accumulate, cudaStream_t stream);

}  // namespace surogate
