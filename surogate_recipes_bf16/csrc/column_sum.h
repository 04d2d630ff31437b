// Sums over the rows of a matrix, without atomics: partial sums of slabs of rows in planned workspace, then their sum
// in a fixed order. For launchers of this library; `linear_bgrad` (norms.h) is the op. All functions only enqueue.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// Into how many slabs `column_partials` divides the rows. Depends on nothing else: every GPU gives the same bits.
int64_t column_slabs(int64_t rows);

// partials fp32 [column_slabs(rows), columns] = sum over the rows of each slab of
//   dy[t, c]                      if x is null
//   dy[t, c] * x[t, c] * rstd[t]  else (the gradient of a norm's weight)
void column_partials(const void* dy, const void* x, const void* rstd, float* partials, int64_t rows, int64_t columns,
                     int dtype, const char* op, cudaStream_t stream);

// out [columns] (+)= sum over `count` rows of partials, fp32 [count, columns]. out is fp32 or bf16 (only written).
void sum_partials(const float* partials, int64_t count, int64_t columns, void* out, bool accumulate, int dtype_out,
                  const char* op, cudaStream_t stream);

}  // namespace surogate
