// Launchers of quantize.cu, dequantize.cu and to_e4m3.cu, which document formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

namespace surogate {

// A param of matrices fused along its rows, each divided into tiles of `tile` x `tile`.
struct TileShape {
    std::vector<int64_t> rows;
    int64_t columns;
    int tile;
};

void fp8_tile_quantize(const void* w, void* codes, void* scales, const TileShape& shape, int dtype, cudaStream_t stream);

void fp8_tile_dequantize(const void* codes, const void* scales, void* out, const TileShape& shape, int dtype,
                         cudaStream_t stream);

void fp8_tile_amax(const void* codes, const void* scales, void* amax, const TileShape& shape, int dtype,
                   cudaStream_t stream);

void fp8_tile_to_e4m3(const void* codes, const void* scales, const void* amax, void* copy, void* scale, bool transposed,
                      const TileShape& shape, int dtype, cudaStream_t stream);

}  // namespace surogate
