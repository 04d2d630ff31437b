// Launchers of the ops beside the gated delta rule, in bf16. Rows are tokens; widths are multiples of 8.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// y[t, c] = f(sum over d of w[c, W - 1 - d] x[t - d, c]), of the tokens of its document: d <= positions[t]. f: SiLU or
// nothing. x, y [tokens, columns] bf16, w [columns, W] bf16, positions [tokens] int32. W is 3 to 7.
void causal_conv(const void* x, const void* w, const void* positions, void* y, int64_t tokens, int64_t columns,
                 int64_t width, bool silu, cudaStream_t stream);
// dw [columns, W] has dtype_dw: fp32, which is written or added to, or bf16, which is written; null: none. workspace:
// causal_conv_bwd_workspace() bytes if dw is not null.
void causal_conv_bwd(const void* dy, const void* x, const void* w, const void* positions, void* dx, void* dw,
                     void* workspace, int64_t tokens, int64_t columns, int64_t width, bool silu, bool accumulate,
                     int dtype_dw, cudaStream_t stream);
int64_t causal_conv_bwd_workspace(int64_t tokens, int64_t columns, int64_t width);

// y = x rstd w silu(gate) of each head of `dim` elements, rstd = 1 / sqrt(mean x^2 + eps). x, gate, y [tokens, heads dim] bf16,
// w [dim] bf16, rstd [tokens, heads] fp32. dim: 64, 128 or 256. y may be x.
void gated_rmsnorm(const void* x, const void* gate, const void* w, void* y, void* rstd, int64_t tokens, int64_t heads,
                   int64_t dim, double eps, cudaStream_t stream);
// dx may be dy, and d_gate may be gate. dw [dim] has dtype_dw as that of causal_conv_bwd; null: none.
void gated_rmsnorm_bwd(const void* dy, const void* x, const void* gate, const void* w, const void* rstd, void* dx,
                       void* d_gate, void* dw, void* workspace, int64_t tokens, int64_t heads, int64_t dim, bool accumulate,
                       int dtype_dw, cudaStream_t stream);
int64_t gated_rmsnorm_bwd_workspace(int64_t dim);

// Columns [q of head 0, gate of head 0, q of head 1, ..., rest] as [q, rest] and [gate], and back.
void split_gate(const void* x, void* qkv, void* gate, int64_t tokens, int64_t heads, int64_t dim, int64_t rest,
                cudaStream_t stream);
void join_gate(const void* qkv, const void* gate, void* x, int64_t tokens, int64_t heads, int64_t dim, int64_t rest,
               cudaStream_t stream);

// Columns [q; k; values; gates] and [b; a] of each key head as [q; k; values], z and [b; a] of all heads, and back. A key head
// has heads / key_heads value heads. k_dim and v_dim are multiples of 8.
void split_key_heads(const void* qkvz, const void* ba, void* qkv, void* z, void* sorted, int64_t tokens, int64_t key_heads,
                     int64_t heads, int64_t k_dim, int64_t v_dim, cudaStream_t stream);
void join_key_heads(const void* qkv, const void* z, const void* sorted, void* qkvz, void* ba, int64_t tokens,
                    int64_t key_heads, int64_t heads, int64_t k_dim, int64_t v_dim, cudaStream_t stream);

// y = x sigmoid(gate), of `size` elements. Outputs may be inputs: y may be x, dx may be dy, d_gate may be gate.
void sigmoid_gate(const void* x, const void* gate, void* y, int64_t size, cudaStream_t stream);
void sigmoid_gate_bwd(const void* dy, const void* x, const void* gate, void* dx, void* d_gate, int64_t size,
                      cudaStream_t stream);

}  // namespace surogate
