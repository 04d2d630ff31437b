// Launchers of quantize.cu, dequantize.cu and to_e4m3.cu, which document formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace surogate {

// A param of matrices fused along its rows, quantized in blocks of `block` consecutive elements.
struct Nf4Shape {
    std::vector<int64_t> rows;
    int64_t columns;
    int block;
};

// The scales of blocks: fp32, if `nested` is null, otherwise uint8 codes.
struct Nf4Scales {
    const void* absmax;
    const void* nested;
    const void* offset;
    const void* map;
};

void nf4_quantize(const void* w, void* codes, void* absmax, const Nf4Shape& shape, int dtype, cudaStream_t stream);

void nf4_compress(const void* absmax, void* sums, void* codes, void* nested, void* offset, const void* map,
                  const Nf4Shape& shape, cudaStream_t stream);

void nf4_dequantize(const void* codes, const Nf4Scales& scales, void* out, const Nf4Shape& shape, int dtype,
                    cudaStream_t stream);

void nf4_amax(const void* codes, const Nf4Scales& scales, void* amax, const Nf4Shape& shape, int dtype,
              cudaStream_t stream);

void nf4_to_e4m3(const void* codes, const Nf4Scales& scales, const void* amax, void* copy, void* scale, bool transposed,
                 const Nf4Shape& shape, int dtype, cudaStream_t stream);

}  // namespace surogate
