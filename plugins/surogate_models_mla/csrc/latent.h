// Launchers of latent.cu, which documents layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void latent_split(const void* x, void* latent, void* rotated, int64_t tokens, int64_t rank, int64_t rotary,
                  cudaStream_t stream);
void latent_split_bwd(const void* d_latent, const void* d_rotated, void* dx, int64_t tokens, int64_t rank, int64_t rotary,
                  cudaStream_t stream);

void latent_qkv(const void* q, const void* kv, const void* rotated, void* qkv, int64_t tokens, int64_t heads, int64_t nope,
                int64_t rotary, int64_t v_dim, bool interleaved, cudaStream_t stream);
void latent_qkv_bwd(const void* dqkv, void* dq, void* dkv, void* d_rotated, int64_t tokens, int64_t heads, int64_t nope,
                    int64_t rotary, int64_t v_dim, bool interleaved, cudaStream_t stream);

// Copies the first min(from, to) elements of each head; what is wider in `out` is zeros.
void latent_values(const void* y, void* out, int64_t tokens, int64_t heads, int64_t from, int64_t to,
                   cudaStream_t stream);

}  // namespace surogate
