// Launchers of quantize.cu, dequantize.cu and to_fp8.cu, which document formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace surogate {

// A param of matrices fused along its rows.
struct Mxfp4Shape {
    std::vector<int64_t> rows;
    int64_t columns;
};

// The stored form of a param.
struct Mxfp4Weight {
    void* codes;
    void* scales;
};

void mxfp4_quantize(const void* w, void* codes, void* scales, int64_t rows, int64_t columns, int dtype,
                    cudaStream_t stream);

void mxfp4_dequantize(const Mxfp4Weight& weight, void* out, const Mxfp4Shape& shape, int dtype, cudaStream_t stream);

void mxfp4_amax(const Mxfp4Weight& weight, void* amax, const Mxfp4Shape& shape, int dtype, cudaStream_t stream);

// Copies of some matrices of a param: amax [of, 2] is of all.
void mxfp4_to_e4m3(const Mxfp4Weight& weight, const void* amax, int64_t of, void* copy, void* scale,
                   bool transposed, const Mxfp4Shape& shape, int dtype, cudaStream_t stream);

void mxfp4_to_e5m2(const Mxfp4Weight& weight, const void* amax, int64_t of, void* copy, void* scale,
                   bool transposed, const Mxfp4Shape& shape, int dtype, cudaStream_t stream);

}  // namespace surogate
