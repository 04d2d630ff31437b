// Launchers of quantize.cu, dequantize.cu and to_e4m3.cu, which document formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace surogate {

// A param of matrices fused along its rows.
struct Fp4Shape {
    std::vector<int64_t> rows;
    int64_t columns;
};

// The stored form of a param.
struct Fp4Weight {
    void* codes;
    void* scales;
    void* global_scales;
};

void fp4_block_quantize(const void* w, const Fp4Weight& weight, void* amax, const Fp4Shape& shape, bool four_over_six,
                        int dtype, cudaStream_t stream);

void fp4_block_dequantize(const Fp4Weight& weight, void* out, const Fp4Shape& shape, int dtype, cudaStream_t stream);

void fp4_block_amax(const Fp4Weight& weight, void* amax, const Fp4Shape& shape, int dtype, cudaStream_t stream);

void fp4_block_to_e4m3(const Fp4Weight& weight, const void* amax, void* copy, void* scale, bool transposed,
                       const Fp4Shape& shape, int dtype, cudaStream_t stream);

}  // namespace surogate
