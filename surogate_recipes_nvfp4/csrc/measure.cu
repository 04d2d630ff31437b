// nvfp4_measure: how a form of x differs from x. figures [3] = (amax, error, lost):
//
//   error  sqrt(sum (rounded - x)^2 / sum x^2), 0 if x is 0
//   lost   share of the elements of x other than 0 whose rounded value is 0
//
// nvfp4_report: copies the figures of n tensors into the rows of a table [n, 3].
//
//   x        bf16 [R, C], aligned to 16 bytes; codes, scales, amax: a form of it (quantize.cu)
//   partial  workspace: fp32 [measure_blocks][4] sums of (rounded - x)^2, x^2, elements other than 0, and those lost
//
// Two launches: the sums of each of measure_blocks thread blocks, over blocks of 16 elements in a fixed order, then their
// sum in fp64 by one thread. So the bits do not depend on timing.
//
// Bytes moved per element: 2.5625 read. It runs in steps whose numerics are reported.
#include <surogate/check.h>
#include <surogate/reduce.cuh>

#include "nvfp4.cuh"
#include "nvfp4.h"

namespace surogate {
namespace {

constexpr int threads = 256;

struct Sums {
    float error = 0.0f, power = 0.0f, present = 0.0f, lost = 0.0f;
};

__global__ void __launch_bounds__(threads)
    measure_kernel(const uint4* __restrict__ x, const uint2* __restrict__ codes, const uint8_t* __restrict__ scales,
                   const float* __restrict__ amax, float4* __restrict__ partial, unsigned blocks_per_row, int64_t blocks) {
    const float step = __fdiv_rn(amax[0], 6.0f * amax[1]);
    const unsigned atoms_wide = (blocks_per_row + 3) / 4;
    Sums sums;
    for (int64_t at = blockIdx.x * threads + threadIdx.x; at < blocks; at += gridDim.x * threads) {
        const int64_t row = at / blocks_per_row, block = at % blocks_per_row;
        const int64_t atom = row / 128 * atoms_wide + block / 4;
        const float scale = float_of_ue4m3(scales[atom * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4]);
        const uint4 first = x[2 * at], second = x[2 * at + 1];
        const Fp4Elements elements{{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}};
        const uint2 packed = codes[at];
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            const float value = elements.get(i);
            const float rounded = float_of_e2m1((i < 8 ? packed.x : packed.y) >> 4 * (i % 8)) * scale * step;
            const float d = rounded - value;
            sums.error += d * d;
            sums.power += value * value;
            sums.present += value != 0.0f;
            sums.lost += value != 0.0f && rounded == 0.0f;
        }
    }
    __shared__ float4 warps[threads / 32];
    float4 total = make_float4(sums.error, sums.power, sums.present, sums.lost);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        total.x += __shfl_xor_sync(full_warp, total.x, lanes);
        total.y += __shfl_xor_sync(full_warp, total.y, lanes);
        total.z += __shfl_xor_sync(full_warp, total.z, lanes);
        total.w += __shfl_xor_sync(full_warp, total.w, lanes);
    }
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < threads / 32; ++i) {
            total.x += warps[i].x;
            total.y += warps[i].y;
            total.z += warps[i].z;
            total.w += warps[i].w;
        }
        partial[blockIdx.x] = total;
    }
}

__global__ void finish_kernel(const float4* __restrict__ partial, int count, const float* __restrict__ amax,
                              float* __restrict__ figures) {
    double error = 0.0, power = 0.0, present = 0.0, lost = 0.0;
    for (int i = 0; i < count; ++i) {
        error += partial[i].x;
        power += partial[i].y;
        present += partial[i].z;
        lost += partial[i].w;
    }
    figures[0] = amax[0];
    figures[1] = power > 0.0 || !(power == power) ? static_cast<float>(sqrt(error / power)) : 0.0f;
    figures[2] = present > 0.0 ? static_cast<float>(lost / present) : 0.0f;
}

__global__ void report_kernel(const float* const* __restrict__ figures, float* __restrict__ table, int64_t tensors) {
    for (int64_t i = threadIdx.x; i < tensors * fp4_figures; i += blockDim.x) {
        table[i] = figures[i / fp4_figures][i % fp4_figures];
    }
}

}  // namespace

void nvfp4_measure(const void* x, const void* codes, const void* scales, const void* amax, void* figures, void* partial,
                   int64_t rows, int64_t columns, cudaStream_t stream) {
    constexpr const char* op = "nvfp4_measure";
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(columns % fp4_block == 0, op, "columns must be a multiple of 16, got " + std::to_string(columns));
    for (const auto& [pointer, name] : {std::pair(x, "x"), std::pair(codes, "codes"), std::pair(scales, "scales"),
                                        std::pair(static_cast<const void*>(partial), "workspace")}) {
        check_pointer(pointer, op, name, 16);
    }
    check_pointer(amax, op, "amax", 8);
    check_pointer(figures, op, "figures", 4);
    const int64_t per_row = columns / fp4_block;
    measure_kernel<<<fp4_measure_blocks, threads, 0, stream>>>(
        static_cast<const uint4*>(x), static_cast<const uint2*>(codes), static_cast<const uint8_t*>(scales),
        static_cast<const float*>(amax), static_cast<float4*>(partial),
        static_cast<unsigned>(to_int(per_row, op, "columns / 16")), rows * per_row);
    check_launch(op);
    finish_kernel<<<1, 1, 0, stream>>>(static_cast<const float4*>(partial), fp4_measure_blocks,
                                       static_cast<const float*>(amax), static_cast<float*>(figures));
    check_launch(op);
}

void nvfp4_report(const void* figures, void* table, int64_t tensors, cudaStream_t stream) {
    constexpr const char* op = "nvfp4_report";
    check_positive(tensors, op, "tensors");
    check_pointer(figures, op, "figures", 8);
    check_pointer(table, op, "table", 4);
    report_kernel<<<1, 256, 0, stream>>>(static_cast<const float* const*>(figures), static_cast<float*>(table), tensors);
    check_launch(op);
}

}  // namespace surogate
