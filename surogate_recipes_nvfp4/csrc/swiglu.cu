// gate_up [T, 2F], columns are the halves [gate; up]:
//   nvfp4_swiglu      out [T, F] = silu(gate) * up, the bits of swiglu
//   nvfp4_swiglu_bwd  dgate_up [T, 2F], the bits of swiglu_bwd
//
//   measured  fp32 [4], aligned to 16 bytes: of out, or of dgate_up, the largest finite magnitude, 1 if an element is not
//             finite, and both of its Hadamard transform along T: what the first launch of nvfp4_quantize finds
//
// Tensors are bf16, row-major, aligned to 4 bytes; T is a multiple of 16, F an even number. dgate_up may be the same buffer
// as gate_up: a thread reads its elements before it writes them, and no other thread reads them.
//
// Grid: a thread has two adjacent columns of 16 rows, and a warp reads 128 adjacent bytes of a row. At most 1,056 blocks, 8
// for each SM of an H200, so that few add to the same four numbers.
//
// Bytes moved per element of F: 4 read + 2 written; backward 6 + 4. Floor at 4.3 TB/s for 8,192 x
// 12,288: 140 us, backward 234 us. The first launch of nvfp4_quantize reads 2 bytes an element of what is quantized again:
// 47 us of out and 94 us of dgate_up. Instructions per element of F, by the code for SM90: 27 and 47, so 96 and 163 us of an
// H200 at 128 per clock and SM and 1.7 GHz. Not measured yet.
#include <surogate/check.h>
#include <surogate/quantize_tile.cuh>
#include <surogate/swiglu.cuh>

#include <algorithm>
#include <string>

#include "nvfp4.cuh"
#include "nvfp4.h"

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr int64_t max_blocks = 1056;

// Two bf16.
using Words = uint32_t[fp4_block];

__device__ __forceinline__ float lower(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float upper(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ uint32_t rounded(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
}

// The magnitudes of elements, and of their transform.
struct Magnitudes {
    AbsMax plain, transformed;

    __device__ __forceinline__ void add(const Words& words) {
        Fp4Elements columns[2];
        fp4_columns<true>(words, columns);
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            plain.add(words[i]);
            transformed.add(columns[i / 8].pair[i % 8]);
        }
    }

    __device__ __forceinline__ void raise(float* measured) const {
        __shared__ uint32_t tops[2][threads / 32];
        plain.stage(tops[0]);
        transformed.stage(tops[1]);
        __syncthreads();
        AbsMax::raise(tops[0], measured);
        AbsMax::raise(tops[1], measured + 2);
    }
};

// The 16 rows of a thread. `stride` is the number of words of a row.
__device__ __forceinline__ void load(Words& words, const uint32_t* from, int64_t stride) {
#pragma unroll
    for (int i = 0; i < fp4_block; ++i) {
        words[i] = from[i * stride];
    }
}

__device__ __forceinline__ void store(const Words& words, uint32_t* to, int64_t stride) {
#pragma unroll
    for (int i = 0; i < fp4_block; ++i) {
        to[i * stride] = words[i];
    }
}

// `width` words are half a row, and `count` the items of all threads.
__global__ void __launch_bounds__(threads, 3)
    swiglu_kernel(const uint32_t* gate_up, uint32_t* out, float* measured, unsigned width, unsigned count) {
    Magnitudes magnitudes;
    for (unsigned at = blockIdx.x * threads + threadIdx.x; at < count; at += gridDim.x * threads) {
        const int64_t row = at / width * static_cast<int64_t>(fp4_block), column = at % width;
        Words gate, up;
        load(gate, gate_up + row * 2 * width + column, 2 * width);
        load(up, gate_up + row * 2 * width + width + column, 2 * width);
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            gate[i] = rounded(swiglu<true>(lower(gate[i]), lower(up[i])), swiglu<true>(upper(gate[i]), upper(up[i])));
        }
        store(gate, out + row * width + column, width);
        magnitudes.add(gate);
    }
    magnitudes.raise(measured);
}

__global__ void __launch_bounds__(threads, 2)
    swiglu_bwd_kernel(const uint32_t* dout, const uint32_t* gate_up, uint32_t* dgate_up, float* measured, unsigned width,
                      unsigned count) {
    Magnitudes magnitudes;
    for (unsigned at = blockIdx.x * threads + threadIdx.x; at < count; at += gridDim.x * threads) {
        const int64_t row = at / width * static_cast<int64_t>(fp4_block), column = at % width;
        const int64_t whole = row * 2 * width + column;
        Words d, gate, up;
        load(d, dout + row * width + column, width);
        load(gate, gate_up + whole, 2 * width);
        load(up, gate_up + whole + width, 2 * width);
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            const auto low = SwigluGradient::of<true>(lower(d[i]), lower(gate[i]), lower(up[i]));
            const auto high = SwigluGradient::of<true>(upper(d[i]), upper(gate[i]), upper(up[i]));
            gate[i] = rounded(low.gate, high.gate);
            up[i] = rounded(low.up, high.up);
        }
        store(gate, dgate_up + whole, 2 * width);
        store(up, dgate_up + whole + width, 2 * width);
        magnitudes.add(gate);
        magnitudes.add(up);
    }
    magnitudes.raise(measured);
}

struct Grid {
    unsigned blocks, width, count;
};

// Checks arguments, clears `measured`, and returns the grid.
Grid prepared(const char* op, const void* gate_up, const void* half, const char* half_name, void* measured, int64_t rows,
              int64_t width, cudaStream_t stream) {
    check_positive(rows, op, "rows");
    check_positive(width, op, "width");
    SUROGATE_REQUIRE(rows % fp4_block == 0, op, "rows must be a multiple of 16, got " + std::to_string(rows));
    SUROGATE_REQUIRE(width % 2 == 0, op, "width must be even, got " + std::to_string(width));
    check_pointer(gate_up, op, "gate_up", 4);
    check_pointer(half, op, half_name, 4);
    check_pointer(measured, op, "measured", 16);
    check_cuda(cudaMemsetAsync(measured, 0, 16, stream), op);
    const int64_t words = width / 2, count = rows / fp4_block * words;
    return {static_cast<unsigned>(std::min(ceil_div(count, threads), max_blocks)),
            static_cast<unsigned>(to_int(words, op, "width")), static_cast<unsigned>(to_int(count, op, "elements / 32"))};
}

}  // namespace

void nvfp4_swiglu(const void* gate_up, void* out, void* measured, int64_t rows, int64_t width, cudaStream_t stream) {
    constexpr const char* op = "nvfp4_swiglu";
    const Grid grid = prepared(op, gate_up, out, "out", measured, rows, width, stream);
    swiglu_kernel<<<grid.blocks, threads, 0, stream>>>(static_cast<const uint32_t*>(gate_up), static_cast<uint32_t*>(out),
                                                       static_cast<float*>(measured), grid.width, grid.count);
    check_launch(op);
}

void nvfp4_swiglu_bwd(const void* dout, const void* gate_up, void* dgate_up, void* measured, int64_t rows, int64_t width,
                      cudaStream_t stream) {
    constexpr const char* op = "nvfp4_swiglu_bwd";
    check_pointer(dgate_up, op, "dgate_up", 4);
    const Grid grid = prepared(op, gate_up, dout, "dout", measured, rows, width, stream);
    swiglu_bwd_kernel<<<grid.blocks, threads, 0, stream>>>(
        static_cast<const uint32_t*>(dout), static_cast<const uint32_t*>(gate_up), static_cast<uint32_t*>(dgate_up),
        static_cast<float*>(measured), grid.width, grid.count);
    check_launch(op);
}

}  // namespace surogate
