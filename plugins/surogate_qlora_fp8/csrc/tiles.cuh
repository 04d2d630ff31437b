// Conversions of E4M3, the tiles of a fused param, and checks of arguments.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <surogate/check.h>
#include <surogate/dtype.h>

#include <cstring>
#include <surogate/fused_rows.cuh>
#include <surogate/words.cuh>

#include "tiles.h"

namespace surogate {

// Converts the E4M3 codes in bytes 0 and 1 of `pair` to floats.
__device__ __forceinline__ float2 floats_of_e4m3(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    return __half22float2(__half2(halves));
#else
    // Sign, exponent and mantissa in the places that they have in fp16, whose exponent is biased by 8 more. Subnormals
    // are exact. 0x7F and 0xFF are NaN; all their bits but the sign are set.
    const uint32_t wide = __byte_perm(pair, 0, 0x1404);  // each byte as the upper one of a half
    const uint32_t bits = (wide & 0x80008000u) | (wide >> 1 & 0x3f803f80u);
    __half2 halves;
    memcpy(&halves, &bits, sizeof(halves));
    float2 x = __half22float2(__hmul2(halves, __float2half2_rn(256.0f)));
    x.x = (wide & 0x7f00u) == 0x7f00u ? __int_as_float(0x7fffffff) : x.x;
    x.y = (wide & 0x7f000000u) == 0x7f000000u ? __int_as_float(0x7fffffff) : x.y;
    return x;
#endif
}

inline void check_tiles(const TileShape& shape, const void* codes, const void* scales, int dtype, const char* op) {
    check_positive(shape.columns, op, "columns");
    SUROGATE_REQUIRE(shape.columns % octet == 0, op,
                     "columns must be a multiple of 8, got " + std::to_string(shape.columns));
    SUROGATE_REQUIRE(shape.tile == 64 || shape.tile == 128 || shape.tile == 256, op,
                     "tile must be 64, 128 or 256, got " + std::to_string(shape.tile));
    check_pointer(codes, op, "codes", 16);
    check_pointer(scales, op, "scales", 4);
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, "the weight must be fp32 or bf16");
}

}  // namespace surogate
