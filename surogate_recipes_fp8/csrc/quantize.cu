// fp8_quantize  q [R, C] = x * encode in FP8 (fp8.cuh);  q_t [C, R]: the same bytes transposed;
//               dbias [C] (+)= sum over r of x[r, c]
// fp8_amax      amax [2] = (largest finite |x|, 1 if an x is not finite)
//
// x is bf16 or fp32, row-major. q_t and dbias are optional; dbias is for bf16 x. R and C are multiples of 16; tensors are
// aligned to 16 bytes. Scales and amax: scale.h. With current scaling, and fallback scaling without an initialised
// scale, a launch before measures the amax, for 2 more bytes per element of bf16.
//
// Grid: one block of 256 threads per tile of 64 x 128, 4 blocks per SM or more. The sums over the 64 rows of a tile are
// written to a workspace, which a second launch adds in a fixed order. Results do not depend on the GPU or on timing:
// the maximum, an atomic per block, is exact.
//
// Bytes moved per element: 2 read + 1 + 1 written (fp32 x: 4 read). Floor at 4.26 TB/s: 8,192 x 4,096 in bf16 31.5 us.
// Measured on an H200: 85 % of bandwidth or more. Arithmetic takes about a third of the time: 6 instructions per element
// of the 24 that an SM issues at 1.5 GHz while it moves 4 bytes. The partial sums add 3 % of the bytes.
#include "quantize.h"

#include <surogate/sum_partials.cuh>

#include "quantize.cuh"

namespace surogate {
namespace {

struct Fp32Source {
    using Value = Floats;
    struct Raw {
        Vec<float, 4> part[2];
    };
    static constexpr bool can_store = false;
    static constexpr int outputs = 1, count = 1, blocks = 4;

    const float* x;
    int64_t columns;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        const float* at = x + row * columns + column;
        return {Vec<float, 4>::load(at), Vec<float, 4>::load(at + 4)};
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[1]) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[0].value[i] = raw.part[i / 4][i % 4];
        }
    }
};

// Calls function(source) for x of dtype fp32 or bf16.
template <class Function>
void with_source(const void* x, int64_t columns, int dtype, const char* op, Function&& function) {
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, std::string("x must be fp32 or bf16, not ") + name_of(dtype));
    if (dtype == BF16) {
        function(Bf16Source{static_cast<const __nv_bfloat16*>(x), columns});
    } else {
        function(Fp32Source{static_cast<const float*>(x), columns});
    }
}

void quantize_with_sums(const void* x, const Quantized& to, const ColumnSums& sums, Extent size, int format,
                        const Scale& scale, const char* op, cudaStream_t stream) {
    const int64_t rows = size.rows, columns = size.columns;
    const int64_t tiles = ceil_div(rows, Tile::rows), needed = tiles * columns * 4;
    check_pointer(sums.dbias, op, "dbias", bytes_of(sums.dtype));
    check_pointer(sums.partials, op, "workspace", 16);
    SUROGATE_REQUIRE(sums.partials_bytes >= needed, op,
                     "workspace needs " + std::to_string(needed) + " bytes, got " + std::to_string(sums.partials_bytes));
    const Bf16Source source{static_cast<const __nv_bfloat16*>(x), columns};
    if (scale.measures()) {
        measure(source, scale.unless(), scale.measured, rows, columns, op, stream);
    }
    with_format(format, op, [&](auto constant) {
        launch_quantize<decltype(constant)::value, -1, true>(source, to, scale, rows, columns, op, stream);
    });
    sum_partials(to.partials, tiles, columns, sums.dbias, sums.accumulate, sums.dtype, op, stream);
}

}  // namespace

void check_scale(const Scale& scale, const char* op) {
    SUROGATE_REQUIRE(scale.scaling >= kDelayed && scale.scaling <= kFallback, op,
                     "unknown scaling " + std::to_string(scale.scaling));
    if (scale.scaling != kCurrent) {
        check_pointer(scale.given, op, "scale", 8);
    }
    if (scale.scaling == kDelayed) {
        check_pointer(scale.amax, op, "amax", 8);
    }
    if (scale.measures()) {
        check_pointer(scale.out, op, "the scale that is written", 8);
        check_pointer(scale.measured, op, "workspace", 8);
    }
}

void fp8_quantize(const void* x, void* q, void* q_t, const ColumnSums& sums, Extent size, int dtype_x, int format,
                  const Scale& scale, cudaStream_t stream) {
    constexpr const char* op = "fp8_quantize";
    check_tiles(size.rows, size.columns, op);
    check_pointer(x, op, "x", 16);
    check_pointer(q, op, "q", 16);
    SUROGATE_REQUIRE(is_aligned(q_t, 16), op, "q_t must be aligned to 16 bytes");
    check_scale(scale, op);
    Quantized to{static_cast<uint8_t*>(q), static_cast<uint8_t*>(q_t)};
    if (sums.dbias != nullptr) {
        SUROGATE_REQUIRE(dtype_x == BF16, op, std::string("column sums need x in bf16, not ") + name_of(dtype_x));
        to.partials = static_cast<float*>(sums.partials);
        return quantize_with_sums(x, to, sums, size, format, scale, op, stream);
    }
    with_source(x, size.columns, dtype_x, op, [&](const auto& source) {
        with_format(format, op, [&](auto constant) {
            quantize_source<decltype(constant)::value>(source, to, scale, size.rows, size.columns, op, stream);
        });
    });
}

void fp8_amax(const void* x, void* amax, Extent size, int dtype_x, cudaStream_t stream) {
    constexpr const char* op = "fp8_amax";
    check_tiles(size.rows, size.columns, op);
    check_pointer(x, op, "x", 16);
    check_pointer(amax, op, "amax", 8);
    with_source(x, size.columns, dtype_x, op, [&](const auto& source) {
        measure(source, nullptr, static_cast<float*>(amax), size.rows, size.columns, op, stream);
    });
}

}  // namespace surogate
