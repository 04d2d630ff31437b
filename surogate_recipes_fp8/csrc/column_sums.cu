#include "column_sums.h"

#include <surogate/dtype.h>
#include <surogate/sum_partials.cuh>

namespace surogate {

void sum_rows(const float* partials, int64_t count, int64_t columns, void* out, bool accumulate, int dtype_out,
              const char* op, cudaStream_t stream) {
    SUROGATE_REQUIRE(dtype_out == FP32 || (dtype_out == BF16 && !accumulate), op,
                     std::string("sums over rows are fp32, or bf16 if they are not added to; got ") + name_of(dtype_out));
    if (dtype_out == FP32) {
        sum_partials(partials, count, columns, static_cast<float*>(out), accumulate, op, stream);
    } else {
        sum_partials(partials, count, columns, static_cast<__nv_bfloat16*>(out), false, op, stream);
    }
}

}  // namespace surogate
