// nvfp4_measure: how a form of x differs from x. sums [R, 5] = of each row
//
//   largest  its largest magnitude, NaN if an element is not finite
//   error    sum (rounded - x)^2
//   power    sum x^2
//   present  elements other than 0
//   lost     those of them whose rounded value is 0
//
// nvfp4_report: table [n, 3] = (the largest of largest, sqrt(sum error / sum power), sum lost / sum present) of n tensors; the
// second and the third are 0 if x is 0.
//
//   x       bf16 [R, C], aligned to 16 bytes; codes, scales, amax: a form of it (quantize.cu)
//   sums    fp32, of n tensors of as many rows
//
// One launch each. A warp sums a row over blocks of 16 elements, a thread block the rows of a tensor in fp64, both in a fixed
// order. So the bits do not depend on timing, and those of a row not on the others.
//
// Bytes moved per element: 2.5625 read. It runs in steps whose numerics are reported.
#include <surogate/check.h>
#include <surogate/reduce.cuh>

#include "nvfp4.cuh"
#include "nvfp4.h"

namespace surogate {
namespace {

constexpr int threads = 256, rows_of_a_block = threads / 32;
constexpr int sums_of_a_row = fp4_of_a_row - 1;  // all but the largest magnitude

// The larger of two magnitudes; NaN if one of them is.
template <class T>
__device__ __forceinline__ T larger(T a, T b) {
    return a > b || a != a ? a : b;
}

__global__ void __launch_bounds__(threads)
    measure_kernel(const uint4* __restrict__ x, const uint2* __restrict__ codes, const uint8_t* __restrict__ scales,
                   const float* __restrict__ amax, float* __restrict__ sums, unsigned blocks_per_row, int64_t rows) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_of_a_block + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const float step = __fdiv_rn(amax[0], 6.0f * amax[1]);
    const unsigned atoms_wide = (blocks_per_row + 3) / 4;
    float largest = 0.0f, sum[sums_of_a_row] = {};
    for (unsigned block = threadIdx.x % 32; block < blocks_per_row; block += 32) {
        const int64_t at = row * blocks_per_row + block, atom = row / 128 * atoms_wide + block / 4;
        const float scale = float_of_ue4m3(scales[atom * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4]);
        const uint4 first = x[2 * at], second = x[2 * at + 1];
        const Fp4Elements elements{{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
        const uint2 packed = codes[at];
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            const float value = elements.get(i);
            const float rounded = float_of_e2m1((i < 8 ? packed.x : packed.y) >> 4 * (i % 8)) * scale * step;
            const float d = rounded - value, magnitude = isfinite(value) ? fabsf(value) : __int_as_float(0x7fc00000);
            largest = larger(largest, magnitude);
            sum[0] += d * d;
            sum[1] += value * value;
            sum[2] += value != 0.0f;
            sum[3] += value != 0.0f && rounded == 0.0f;
        }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        largest = larger(largest, __shfl_xor_sync(full_warp, largest, lanes));
#pragma unroll
        for (int i = 0; i < sums_of_a_row; ++i) {
            sum[i] += __shfl_xor_sync(full_warp, sum[i], lanes);
        }
    }
    if (threadIdx.x % 32 == 0) {
        float* to = sums + row * fp4_of_a_row;
        to[0] = largest;
#pragma unroll
        for (int i = 0; i < sums_of_a_row; ++i) {
            to[1 + i] = sum[i];
        }
    }
}

__global__ void __launch_bounds__(threads)
    report_kernel(const float* const* __restrict__ sums, float* __restrict__ table, int64_t rows) {
    __shared__ double of_threads[fp4_of_a_row][threads];
    const float* from = sums[blockIdx.x];
    double total[fp4_of_a_row] = {};
    for (int64_t row = threadIdx.x; row < rows; row += threads) {
        const float* of_row = from + row * fp4_of_a_row;
        total[0] = larger(total[0], static_cast<double>(of_row[0]));
#pragma unroll
        for (int i = 1; i < fp4_of_a_row; ++i) {
            total[i] += of_row[i];
        }
    }
#pragma unroll
    for (int i = 0; i < fp4_of_a_row; ++i) {
        of_threads[i][threadIdx.x] = total[i];
    }
    for (int half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            const int other = threadIdx.x + half;
            of_threads[0][threadIdx.x] = larger(of_threads[0][threadIdx.x], of_threads[0][other]);
#pragma unroll
            for (int i = 1; i < fp4_of_a_row; ++i) {
                of_threads[i][threadIdx.x] += of_threads[i][other];
            }
        }
    }
    if (threadIdx.x == 0) {
        const double error = of_threads[1][0], power = of_threads[2][0], present = of_threads[3][0];
        float* figures = table + blockIdx.x * fp4_figures;
        figures[0] = static_cast<float>(of_threads[0][0]);
        figures[1] = power != 0.0 ? static_cast<float>(sqrt(error / power)) : 0.0f;
        figures[2] = present > 0.0 ? static_cast<float>(of_threads[4][0] / present) : 0.0f;
    }
}

}  // namespace

void nvfp4_measure(const void* x, const void* codes, const void* scales, const void* amax, void* sums, int64_t rows,
                   int64_t columns, cudaStream_t stream) {
    constexpr const char* op = "nvfp4_measure";
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(columns % fp4_block == 0, op, "columns must be a multiple of 16, got " + std::to_string(columns));
    for (const auto& [pointer, name] : {std::pair(x, "x"), std::pair(codes, "codes"), std::pair(scales, "scales")}) {
        check_pointer(pointer, op, name, 16);
    }
    check_pointer(amax, op, "amax", 8);
    check_pointer(sums, op, "sums", 4);
    const int blocks = to_int(ceil_div(rows, rows_of_a_block), op, "rows / 8");
    measure_kernel<<<blocks, threads, 0, stream>>>(
        static_cast<const uint4*>(x), static_cast<const uint2*>(codes), static_cast<const uint8_t*>(scales),
        static_cast<const float*>(amax), static_cast<float*>(sums),
        static_cast<unsigned>(to_int(columns / fp4_block, op, "columns / 16")), rows);
    check_launch(op);
}

void nvfp4_report(const void* sums, void* table, int64_t tensors, int64_t rows, cudaStream_t stream) {
    constexpr const char* op = "nvfp4_report";
    check_positive(tensors, op, "tensors");
    check_positive(rows, op, "rows");
    check_pointer(sums, op, "sums", 8);
    check_pointer(table, op, "table", 4);
    report_kernel<<<to_int(tensors, op, "tensors"), threads, 0, stream>>>(static_cast<const float* const*>(sums),
                                                                          static_cast<float*>(table), rows);
    check_launch(op);
}

}  // namespace surogate
