// Launchers of the gated delta rule over packed documents, in chunks of 64 tokens on a fixed grid, in bf16.
//
// Of a value head, with its key head's normed q (times D^-0.5) and k, beta = sigmoid(b), g = -exp(a_log) softplus(a + dt):
//   S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T     o_t = S_t^T q_t     S = 0 before a document
// In a chunk with G the sum of g over the tokens of the document up to each, and D_ij = exp(G_i - G_j) for j <= i of one
// document, else 0:
//   A = (I + strictly lower(beta K K^T * D))^-1        P = Q K^T * D
//   R = beta (V - reads * K S)     V' = A R     O = reads * Q S + P V'     S <- carry S + (left * K)^T V'
//   reads_i = exp(G_i) if i is of the document that the chunk begins in, else 0
//   left_i = exp(G_63 - G_i) if i is of the document that the chunk ends in, else 0       carry = reads_63
// So the ends of documents are masks: all sizes are known before the run, and nothing is computed on the host. G begins anew in
// each document, so that not even its rounding depends on another one.
//
//   qkv        [T, 2 Hk D + Hv D] bf16: queries, keys and values, after the convolution     T is a multiple of 64
//   ba         [T, 2 Hv] bf16: b, then a
//   a_log, dt_bias  [Hv] fp32
//   positions  [T] int32: 0 where a document begins
//   states     [T / 64, Hv, D, D] bf16: the transpose of S in front of each chunk, [values, keys]
// D = 128, of keys and values alike; Hk divides Hv. Value head h reads key head h / (Hv / Hk).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// Bytes of workspace of the forward and of the backward pass.
int64_t delta_workspace(int64_t tokens, int64_t k_heads, int64_t v_heads);
int64_t delta_bwd_workspace(int64_t tokens, int64_t k_heads, int64_t v_heads);

// Writes out [T, Hv D] bf16 and states, or one of them: the other one is null.
void gated_delta_rule(const void* qkv, const void* ba, const void* a_log, const void* dt_bias, const void* positions,
                      void* out, void* states, void* workspace, int64_t tokens, int64_t k_heads, int64_t v_heads,
                      cudaStream_t stream);
// Writes dqkv and dba in bf16, and da_log and ddt_bias, [Hv]. Each of these has a dtype: fp32, which is written or added to,
// or bf16, which is written. shared_memory: bytes that a block takes at most; 0: as many as the device has. It takes 99 KiB or more, and is faster with 163, then with 227.
void gated_delta_rule_bwd(const void* dout, const void* qkv, const void* ba, const void* a_log, const void* dt_bias,
                          const void* positions, const void* states, void* dqkv, void* dba, void* da_log, void* ddt_bias,
                          void* workspace, int64_t tokens, int64_t k_heads, int64_t v_heads, bool add_a_log, bool add_dt_bias,
                          int dtype_a_log, int dtype_dt_bias, int64_t shared_memory, cudaStream_t stream);

}  // namespace surogate
