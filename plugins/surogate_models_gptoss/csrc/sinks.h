// Launchers of sinks.cu, which documents formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void add_sinks(const void* out, const void* lse, const void* sinks, void* with, void* with_lse, int64_t tokens,
               int64_t heads, int64_t dim, cudaStream_t stream);

// d_sinks [heads] has dtype_d_sinks: fp32, which is written or added to, or bf16, which is written. workspace: sinks_gradient_workspace() bytes.
void sinks_gradient(const void* dout, const void* out, const void* lse, const void* sinks, void* d_sinks, void* workspace,
                    int64_t tokens, int64_t heads, int64_t dim, bool accumulate, int dtype_d_sinks, cudaStream_t stream);
int64_t sinks_gradient_workspace(int64_t tokens, int64_t heads);

}  // namespace surogate
