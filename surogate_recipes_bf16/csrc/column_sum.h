// Sums over the rows of a matrix without atomics: partial sums of slabs of rows in the workspace, which sum_partials.cuh
// adds in a fixed order. For the launchers of this library; the op is `linear_bgrad` (norms.h). The functions are
// asynchronous.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// Returns the number of slabs that `column_partials` divides the rows into. It depends on nothing else, so that results
// are bit-identical on every GPU.
int64_t column_slabs(int64_t rows);

// partials fp32 [column_slabs(rows), columns] = sum over the rows of each slab of
//   dy[t, c]                      if x is null
//   dy[t, c] * x[t, c] * rstd[t]  otherwise (the gradient of a norm weight)
void column_partials(const void* dy, const void* x, const void* rstd, float* partials, int64_t rows, int64_t columns,
                     int dtype, const char* op, cudaStream_t stream);

}  // namespace surogate
