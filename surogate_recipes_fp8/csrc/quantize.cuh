// Kernels that quantize what a source yields: a struct that is copied to the device.
//
//   using Value              eight adjacent elements: Octet or Floats
//   using Raw                what is loaded for eight elements
//   can_store                whether `wide` may be written: the values are not those that were loaded
//   outputs                  number of matrices [rows, columns] side by side that are quantized with one scale
//   count                    number of values; one more than `outputs` with a hidden activation
//   blocks                   blocks per SM that registers must allow
//   Raw fetch(row, column)                 loads
//   void values(Raw&, Value (&)[count])    computes
//
// quantize_kernel  one block per tile of 64 x 128 columns of the source. All loads of a thread precede its stores.
// measure_kernel   raises the amax of the source, writes nothing else.
#pragma once

#include <surogate/check.h>
#include <surogate/reduce.cuh>

#include <algorithm>
#include <string>

#include "fp8.cuh"

namespace surogate {

using Tile = QuantizeTile<64, 128>;

struct Floats {
    float value[8];

    __device__ __forceinline__ void to_float(float* out) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            out[i] = value[i];
        }
    }
};

__device__ __forceinline__ void add(AbsMax& top, const Octet& values) { top.add(values); }
__device__ __forceinline__ void add(AbsMax& top, const Floats& values) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        top.add(values.value[i]);
    }
}

// One access of 16 bytes: the compiler splits `values.store` here.
__device__ __forceinline__ void store(const Octet& values, __nv_bfloat16* to) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(values.word.x), "r"(values.word.y),
                 "r"(values.word.z), "r"(values.word.w));
}

// A bf16 matrix.
struct Bf16Source {
    using Value = Octet;
    using Raw = Value;
    static constexpr bool can_store = false;
    static constexpr int outputs = 1, count = 1, blocks = 4;

    const __nv_bfloat16* x;
    int64_t columns;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        return Raw::load(x + row * columns + column);
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[1]) const { v[0] = raw; }
};

// What a launch writes. Matrices have `outputs` times the columns of the source.
struct Quantized {
    uint8_t* q;
    uint8_t* q_t;            // [columns, rows], may be null
    __nv_bfloat16* wide;     // what q was made of, may be null
    float* partials;         // sums of 64 rows each [ceil(rows / 64), columns], with ColumnSums
    uint8_t* hidden_t;       // the last value transposed, with Hidden
    const float* hidden_scale;
};

// Hidden: format of the hidden activation, or -1.
template <class Source, int Format, int Hidden = -1, bool ColumnSums = false>
__global__ void __launch_bounds__(Tile::threads, Source::blocks)
    quantize_kernel(const Source source, const Quantized to, const Scale scale, int64_t rows, int64_t columns) {
    constexpr int outputs = Source::outputs, staged_values = outputs + (Hidden >= 0);
    __shared__ __align__(16) uint32_t staged[staged_values][Tile::words];
    __shared__ uint32_t tops[Tile::threads / 32];
    __shared__ float sums[ColumnSums ? Tile::rows / 16 : 1][ColumnSums ? Tile::columns : 1];
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * Tile::rows;
    const int64_t first_column = static_cast<int64_t>(blockIdx.x) * Tile::columns;
    const int64_t row = first_row + Tile::row(), column = first_column + Tile::column();
    const bool inside = row < rows && column < columns;

    typename Source::Raw raw[4] = {};
    if (inside) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            raw[i] = source.fetch(row + i, column);
        }
    }
    const float encode = encode_of<Format>(scale);
    const float hidden_encode = Hidden >= 0 && to.hidden_scale[1] != 0 ? to.hidden_scale[1] : 1.0f;
    const bool records = scale.scaling == kDelayed;
    AbsMax top;
    uint32_t bytes[staged_values][4][2];
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        typename Source::Value values[Source::count];
        source.values(raw[i], values);
#pragma unroll
        for (int n = 0; n < outputs; ++n) {
            const int64_t at = ((row + i) * outputs + n) * columns + column;
            if (records) {
                add(top, values[n]);
            }
            if constexpr (Source::can_store) {
                if (inside && to.wide != nullptr) {
                    store(values[n], to.wide + at);
                }
            }
            float x[8];
            values[n].to_float(x);
            if constexpr (ColumnSums) {
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    sum[k] += x[k];
                }
            }
            quantize<Format>(x, encode, bytes[n][i]);
            if (inside) {
                *reinterpret_cast<uint2*>(to.q + at) = make_uint2(bytes[n][i][0], bytes[n][i][1]);
            }
        }
        if constexpr (Hidden >= 0) {
            float x[8];
            values[outputs].to_float(x);
            quantize<Hidden>(x, hidden_encode, bytes[outputs][i]);
        }
    }
    if (to.q_t != nullptr) {
#pragma unroll
        for (int n = 0; n < outputs; ++n) {
            Tile::stage(staged[n], bytes[n]);
        }
    }
    if constexpr (Hidden >= 0) {
        Tile::stage(staged[outputs], bytes[outputs]);
    }
    if constexpr (ColumnSums) {  // over the 16 rows of this warp: lanes l, l + 8, ... have the same columns
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            sum[k] += __shfl_xor_sync(full_warp, sum[k], 8);
            sum[k] += __shfl_xor_sync(full_warp, sum[k], 16);
            if (threadIdx.x % 32 < 8) {
                sums[Tile::row() / 16][Tile::column() + k] = sum[k];
            }
        }
    }
    if (records) {
        top.stage(tops);
    }
    __syncthreads();
    if (to.q_t != nullptr) {
#pragma unroll
        for (int n = 0; n < outputs; ++n) {
            Tile::write(staged[n], to.q_t + n * columns * rows, first_row, first_column, rows, columns);
        }
    }
    if constexpr (Hidden >= 0) {
        Tile::write(staged[outputs], to.hidden_t, first_row, first_column, rows, columns);
    }
    if constexpr (ColumnSums) {
        const int c = threadIdx.x;
        if (c < Tile::columns && first_column + c < columns) {
            to.partials[blockIdx.y * columns + first_column + c] = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
        }
    }
    if (records) {
        AbsMax::raise(tops, scale.amax);
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        publish(scale, encode);
    }
}

// Raises `amax` by the source. Returns at once if `unless` is an initialised scale.
template <class Source>
__global__ void __launch_bounds__(Tile::threads, Source::blocks)
    measure_kernel(const Source source, const float* unless, float* amax, int64_t rows, int64_t columns, int tiles_wide,
                   int tiles) {
    if (is_initialised(unless)) {
        return;
    }
    __shared__ uint32_t tops[Tile::threads / 32];
    AbsMax top;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t row = static_cast<int64_t>(tile / tiles_wide) * Tile::rows + Tile::row();
        const int64_t column = static_cast<int64_t>(tile % tiles_wide) * Tile::columns + Tile::column();
        if (row < rows && column < columns) {
            typename Source::Raw raw[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                raw[i] = source.fetch(row + i, column);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                typename Source::Value values[Source::count];
                source.values(raw[i], values);
#pragma unroll
                for (int n = 0; n < Source::outputs; ++n) {
                    add(top, values[n]);
                }
            }
        }
    }
    top.stage(tops);
    __syncthreads();
    AbsMax::raise(tops, amax);
}

inline void check_tiles(int64_t rows, int64_t columns, const char* op) {
    for (const auto& [size, name] : {std::pair(rows, "rows"), std::pair(columns, "columns")}) {
        check_positive(size, op, name);
        SUROGATE_REQUIRE(size % 16 == 0, op,
                         std::string(name) + " must be a multiple of 16, got " + std::to_string(size));
    }
}

// Sets `amax` to 0, and then raises it by the source.
template <class Source>
void measure(const Source& source, const float* unless, float* amax, int64_t rows, int64_t columns, const char* op,
             cudaStream_t stream) {
    constexpr int64_t max_blocks = 1056;  // 8 for each SM of an H200
    const int64_t wide = ceil_div(columns, Tile::columns);
    const int tiles = to_int(wide * ceil_div(rows, Tile::rows), op, "tiles");
    check_cuda(cudaMemsetAsync(amax, 0, 8, stream), op);
    measure_kernel<<<static_cast<unsigned>(std::min<int64_t>(tiles, max_blocks)), Tile::threads, 0, stream>>>(
        source, unless, amax, rows, columns, static_cast<int>(wide), tiles);
    check_launch(op);
}

template <int Format, int Hidden = -1, bool ColumnSums = false, class Source>
void launch_quantize(const Source& source, const Quantized& to, const Scale& scale, int64_t rows, int64_t columns,
                     const char* op, cudaStream_t stream) {
    const int64_t high = ceil_div(rows, Tile::rows);
    SUROGATE_REQUIRE(high <= 65535, op, "rows must not exceed 4194240, got " + std::to_string(rows));
    const dim3 grid(to_int(ceil_div(columns, Tile::columns), op, "columns"), static_cast<unsigned>(high));
    quantize_kernel<Source, Format, Hidden, ColumnSums>
        <<<grid, Tile::threads, 0, stream>>>(source, to, scale, rows, columns);
    check_launch(op);
}

// Calls function(std::integral_constant<int, E4M3 or E5M2>{}).
template <class Function>
void with_format(int format, const char* op, Function&& function) {
    switch (format) {
        case E4M3:
            return function(std::integral_constant<int, E4M3>{});
        case E5M2:
            return function(std::integral_constant<int, E5M2>{});
        default:
            SUROGATE_REQUIRE(false, op, std::string("dtype must be e4m3 or e5m2, not ") + name_of(format));
    }
}

// For ops that recipes quantize to one format only: activations to e4m3, gradients to e5m2.
inline void require_format(int format, int required, const char* op) {
    SUROGATE_REQUIRE(format == required, op, std::string("dtype must be ") + name_of(required) + ", not " + name_of(format));
}

// Enqueues the launch that measures, if the scale needs one, and the one that quantizes.
template <int Format, class Source>
void quantize_source(const Source& source, const Quantized& to, const Scale& scale, int64_t rows, int64_t columns,
                     const char* op, cudaStream_t stream) {
    if (scale.measures()) {
        measure(source, scale.unless(), scale.measured, rows, columns, op, stream);
    }
    launch_quantize<Format>(source, to, scale, rows, columns, op, stream);
}

}  // namespace surogate
