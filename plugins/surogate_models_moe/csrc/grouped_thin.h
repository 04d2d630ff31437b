// Products over few terms that add to a base, as adapters of experts have them, for SM80 and later.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// w has `experts` experts from `begin` on; `ends` are of all.
// y [rows,width] = base + x [rows,terms] w_e^T of w_e [width,terms], or with `dgrad` base + x w_e of w_e [terms,width].
void grouped_thin(const void* x, const void* w, const void* ends, const void* base, void* y, int64_t rows, int64_t width,
                  int64_t terms, int64_t experts, bool dgrad, int64_t begin, cudaStream_t stream);

}  // namespace surogate
