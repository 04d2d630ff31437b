// Sum over the rows of partial sums (column_sums.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// `out` is fp32, or bf16 without `accumulate`.
void sum_rows(const float* partials, int64_t count, int64_t columns, void* out, bool accumulate, int dtype_out,
              const char* op, cudaStream_t stream);

}  // namespace surogate
