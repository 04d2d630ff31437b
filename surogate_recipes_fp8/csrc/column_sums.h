// Sum over the rows of partial sums (column_sums.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

void sum_rows(const float* partials, int64_t count, int64_t columns, float* out, bool accumulate, const char* op,
              cudaStream_t stream);

}  // namespace surogate
