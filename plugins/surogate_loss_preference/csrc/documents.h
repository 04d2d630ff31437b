// Launchers of documents.cu; what their arguments mean is said there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void document_sums(const float* values, const int32_t* targets, const int32_t* groups, float* sums, float* labels,
                   int64_t tokens, int64_t documents, cudaStream_t stream);

void document_sums_bwd(const float* d_sums, const int32_t* groups, float* d_values, int64_t tokens, int64_t documents,
                       cudaStream_t stream);

}  // namespace surogate
