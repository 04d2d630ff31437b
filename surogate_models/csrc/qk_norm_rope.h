// Launchers of qk_norm_rope.cu and qk_norm_rope_bwd.cu, which document their arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void qk_norm_rope(const void* qkv, const void* q_norm, const void* k_norm, const void* positions, const void* inv_freq,
                  void* out, int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, int64_t rotary_dim,
                  double eps, double offset, double attention_factor, int dtype, cudaStream_t stream);

void qk_norm_rope_bwd(const void* dy, const void* qkv, const void* q_norm, const void* k_norm, const void* positions,
                      const void* inv_freq, void* d_qkv, void* d_q_norm, void* d_k_norm, void* partials,
                      int64_t partial_blocks, int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                      int64_t rotary_dim, double eps, double offset, double attention_factor, bool accumulate_q,
                      bool accumulate_k, int dtype, int d_q_norm_dtype, int d_k_norm_dtype, cudaStream_t stream);

void qk_norm_rope_dgrad(const void* dy, const void* qkv, const void* q_norm, const void* k_norm, const void* positions,
                        const void* inv_freq, void* d_qkv, int64_t tokens, int64_t n_heads, int64_t n_kv_heads,
                        int64_t head_dim, int64_t rotary_dim, double eps, double offset, double attention_factor, int dtype,
                        cudaStream_t stream);

void rope(const void* qkv, const void* positions, const void* inv_freq, void* out, int64_t tokens, int64_t n_heads,
          int64_t n_kv_heads, int64_t head_dim, int64_t rotary_dim, double attention_factor, double query_beta,
          int64_t query_length, int dtype, cudaStream_t stream);

void rope_bwd(const void* dy, const void* positions, const void* inv_freq, void* d_qkv, int64_t tokens, int64_t n_heads,
              int64_t n_kv_heads, int64_t head_dim, int64_t rotary_dim, double attention_factor, double query_beta,
              int64_t query_length, int dtype, cudaStream_t stream);

}  // namespace surogate
