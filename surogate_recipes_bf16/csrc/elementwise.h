// Launchers of elementwise ops and of the embedding. The .cu file of the same name documents formulas and layouts
// (`add`, `cast`, `fill`: elementwise.cu; `commit`: copy.cu; `swiglu_bwd`: swiglu.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void add(const void* a, const void* b, void* out, int64_t size, bool accumulate, int dtype, int dtype_out,
         cudaStream_t stream);

void cast(const void* x, void* y, int64_t size, bool accumulate, int dtype_x, int dtype_y, cudaStream_t stream);

void fill(void* out, int64_t size, double value, int dtype, cudaStream_t stream);

void copy(const void* x, void* y, int64_t n_bytes, cudaStream_t stream);

void commit(const void* clip_coef, const void* x, void* y, int64_t n_bytes, cudaStream_t stream);

void swiglu(const void* gate_up, void* out, int64_t rows, int64_t width, int dtype, cudaStream_t stream);

void swiglu_bwd(const void* dout, const void* gate_up, void* dgate_up, void* out, int64_t rows, int64_t width, int dtype,
                cudaStream_t stream);

void embedding(const void* tokens, const void* w, void* out, int64_t n_tokens, int64_t vocab_size, int64_t columns,
               int dtype, cudaStream_t stream);

void embedding_bwd(const void* dout, const void* tokens, void* dw, void* workspace, int64_t workspace_bytes,
                   int64_t n_tokens, int64_t vocab_size, int64_t columns, bool accumulate, int dtype, int dtype_dw,
                   cudaStream_t stream);

}  // namespace surogate
