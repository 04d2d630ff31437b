// out [C] (+)= sum over i of partials[i, c], in fp32 and in a fixed order: thread row y of 32 sums the rows y, y + 32,
// ...; the block adds these sums in order. So results do not depend on the GPU or on timing.
#pragma once

#include "surogate/check.h"
#include "surogate/dispatch.cuh"
#include "surogate/vec.cuh"

namespace surogate {

template <class Out>
__global__ void __launch_bounds__(1024)
    sum_partials_kernel(const float* __restrict__ partials, int64_t count, int64_t columns, Out* out, bool accumulate) {
    __shared__ float sums[32][32];
    const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
    float sum = 0;
    if (column < columns) {
#pragma unroll 4
        for (int64_t i = threadIdx.y; i < count; i += 32) {
            sum += partials[i * columns + column];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < columns) {
#pragma unroll
        for (int y = 1; y < 32; ++y) {
            sum += sums[y][threadIdx.x];
        }
        out[column] = from_float<Out>(accumulate ? to_float(out[column]) + sum : sum);
    }
}

// partials [count, columns]. out has dtype_out: fp32, which is written or added to, or bf16, which is written. `op` names the
// caller in errors.
inline void sum_partials(const float* partials, int64_t count, int64_t columns, void* out, bool accumulate, int dtype_out,
                         const char* op, cudaStream_t stream) {
    check_accumulate(accumulate, dtype_out, op);
    const int blocks = to_int(ceil_div(columns, 32), op, "columns / 32");
    with_float_type(dtype_out, op, "the sum", [&](auto type) {
        using Out = typename decltype(type)::type;
        sum_partials_kernel<Out>
            <<<blocks, dim3(32, 32), 0, stream>>>(partials, count, columns, static_cast<Out*>(out), accumulate);
    });
    check_launch(op);
}

}  // namespace surogate
