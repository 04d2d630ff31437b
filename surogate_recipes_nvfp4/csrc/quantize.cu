// nvfp4_quantize: the forms of x and of its transpose in NVFP4 (nvfp4.cuh), at least one of them.
//
//   x        bf16 [M, K], aligned to 16 bytes; M and K are multiples of 16
//   codes    e2m1 [R, C]: two to a byte, the first one in its lower half; [M, K] and [K, M]
//   scales   ue4m3 [ceil(R / 128) * 128, ceil(C / 64) * 4]: of each 16 elements of a row; 512 bytes for 128 rows and 4
//            scales of each, in which row r, scale c is byte r % 32 * 16 + r / 32 * 4 + c; 0 beyond the matrix
//   amax     fp32 [2]: the largest magnitude, NaN if an element is not finite, and range / 6
//
//   square         16 x 16 elements have one scale, so both forms hold the same numbers
//   hadamard       the form of the transpose is that of fp4_hadamard along M, with an amax of its own
//   four_over_six  of the scales that map the largest magnitude of a block to 6 and to 4, the one of the smaller squared
//                  error: of a square block the sum over its rows r and r + 8, then + 4, + 2, + 1
//   stochastic     rounds by Philox: key seed, counter (block low, block high, stream, micro_step), stream + 1 for the
//                  transpose; block i of a form is its i-th, row by row, after first_block others: those of the rows
//                  of a whole tensor before x
//
// Two launches: the largest magnitudes, then the forms, in reverse order to read from L2 what the first launch read last.
// The first is left out where the op that computed x has measured it (swiglu.cu).
// Grid: one block of 256 threads per tile of 128 x 128. A thread quantizes four blocks of rows from its registers; a warp
// has 16 rows. For the transpose the tile is in shared memory, rows of 256 bytes with the halves of each block apart, and a
// thread quantizes two times two columns of 16 rows. Codes of the transpose and scales are staged there too, so that all
// accesses to global memory are of whole sectors, and those to shared memory without bank conflicts, but for the bytes
// of scales.
//
// Bytes moved per element: 2 + 2 read, 0.5625 written for each form. Floor at 4.3 TB/s for 8,192 x 4,096: 40 us with both
// forms, less what L2 holds; 16 us of it are the first launch. Instructions of the second launch per element and form, by the
// code for SM90: 19, with stochastic 31, with four_over_six about 50, and with hadamard 3 more, as in the first launch. At 128
// per clock and SM and 1.7 GHz, 19 for each of two forms take 44 us of an H200, more than the 24 us of its bytes. So it is
// bound by arithmetic. Measured there, both launches: rows 47.7 us, both forms 73.4, with hadamard 81.8, with four_over_six
// too 174.5, with stochastic instead 117.3, square blocks 46.8 and 67.9; of 8,192 x 12,288 rows 122.6 (3.75 TB/s).
//
// First launches in a step of Qwen3-8B (8,192 tokens, 31 blocks in FP4, 723 ms): of 63,488 columns a block 32 GB, 7.5 ms by
// this floor, 1.0 %. SwiGLU has 12,288 of these columns and its gradient 24,576; norms have 8,192, their gradients 8,192, and
// attention 10,240, both ways. Those of weights, once a step, read 12 GB, 2.8 ms. SwiGLU alone leaves them out, 4.4 ms: its
// elements do not depend on each other, so that a thread may have the 16 rows of a transform, as no kernel of norms does
// which gives the bits of the bf16 one.
#include <surogate/check.h>
#include <surogate/quantize_tile.cuh>
#include <surogate/reduce.cuh>

#include <algorithm>
#include <string>

#include "nvfp4.cuh"
#include "nvfp4.h"

namespace surogate {
namespace {

constexpr const char* op = "nvfp4_quantize";
// Sides of tiles and numbers of threads are unsigned: so are indices, which are divided by them.
constexpr unsigned block = fp4_block, side = 128, threads = 256, blocks_wide = side / block, words_wide = side / 2;

struct Form {
    uint2* codes;  // of a block of 16
    uint8_t* scales;
    float* amax;
};

struct Random {
    const int32_t* micro_step;
    const int64_t* seed;
    uint32_t stream;
    int64_t first_block;

    template <bool Stochastic>
    __device__ __forceinline__ PhiloxWords of(int64_t block, uint32_t transposed) const {
        if constexpr (Stochastic) {
            return random_halves(first_block + block, *seed, stream + transposed, *micro_step);
        } else {
            return {};
        }
    }
};

// Returns the index of the 16 bytes of the tile that hold half `half` of block `at` of a row. Those that eight threads read
// or write at once, all blocks or four blocks with both halves, lie in different banks.
__device__ __forceinline__ unsigned chunk_of(unsigned row, unsigned at, unsigned half) {
    return row * 2 * blocks_wide + half * blocks_wide + (at + 4 * half) % blocks_wide;
}

// Returns the index of the staged codes of block `at` of column `column`. A warp writes one block of even or odd columns.
__device__ __forceinline__ unsigned staged_at(unsigned column, unsigned at) {
    const unsigned line = column / 2;
    return line * 2 * blocks_wide + ((at + blocks_wide * (column % 2)) ^ (line % (2 * blocks_wide)));
}

// Returns the byte of the scale of a row's block in the two atoms of a tile.
__device__ __forceinline__ unsigned scale_at(unsigned row, unsigned at) {
    return at / 4 * 512 + row % 32 * 16 + row / 32 * 4 + at % 4;
}

// Threads 0 to 63 write the staged scales of the tile whose first block is `first`, in row `row` of tiles, of a matrix with
// this number of blocks in a row.
__device__ __forceinline__ void write_scales(const uint8_t* staged, uint8_t* scales, unsigned row, unsigned first,
                                             unsigned blocks, unsigned thread) {
    const unsigned atoms_wide = (blocks + 3) / 4, atom = first / 4 + thread / 32;
    if (atom < atoms_wide) {
        const size_t to = (static_cast<size_t>(row) * atoms_wide + atom) * 32 + thread % 32;
        reinterpret_cast<uint4*>(scales)[to] = reinterpret_cast<const uint4*>(staged)[thread];
    }
}

// The scales of the four row blocks of a thread. With Square, 16 threads share one.
template <bool Square, bool FourOverSix>
__device__ __forceinline__ void scales_of(const Fp4Elements (&x)[4], const Fp4Matrix<FourOverSix>& matrix,
                                          Fp4Scale (&scale)[4]) {
    if constexpr (Square) {
        float top = fmaxf(fmaxf(x[0].top(), x[1].top()), fmaxf(x[2].top(), x[3].top()));
        top = fmaxf(top, __shfl_xor_sync(full_warp, top, 8));
        top = fmaxf(top, __shfl_xor_sync(full_warp, top, 16));
        const auto total = [&](const Fp4Scale& candidate, auto error) {  // this thread has the rows q, q + 4, q + 8, q + 12
            const float even = __fadd_rn(error(x[0], candidate), error(x[2], candidate));
            const float odd = __fadd_rn(error(x[1], candidate), error(x[3], candidate));
            float sum = __fadd_rn(even, odd);
            sum = __fadd_rn(sum, __shfl_xor_sync(full_warp, sum, 16));
            return __fadd_rn(sum, __shfl_xor_sync(full_warp, sum, 8));
        };
        scale[0] = fp4_scale(top, matrix, total);
        scale[1] = scale[2] = scale[3] = scale[0];
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const auto total = [&](const Fp4Scale& candidate, auto error) { return error(x[i], candidate); };
            scale[i] = fp4_scale(x[i].top(), matrix, total);
        }
    }
}

template <bool FourOverSix>
__device__ __forceinline__ void publish(float* amax, const float* measured) {
    amax[0] = measured[1] != 0.0f ? __int_as_float(0x7fc00000) : measured[0];
    amax[1] = Fp4Matrix<FourOverSix>::range / 6.0f;
}

// x has `high` times `wide` blocks of 16 x 16.
template <bool Square, bool Hadamard, bool FourOverSix, bool Stochastic>
__global__ void __launch_bounds__(threads, FourOverSix ? 2 : 3)
    quantize_kernel(const uint4* __restrict__ x, const Form rows, const Form columns, const float* __restrict__ measured,
                    const Random random, unsigned high, unsigned wide, unsigned tiles_wide) {
    __shared__ uint4 tile[side * 2 * blocks_wide];
    __shared__ uint2 staged[side * blocks_wide];
    __shared__ __align__(16) uint8_t scales[2][side * blocks_wide];
    __shared__ Fp4Scale squares[Square ? blocks_wide * blocks_wide : 1];
    const unsigned number = gridDim.x - 1 - blockIdx.x, thread = threadIdx.x;
    const unsigned tile_row = number / tiles_wide, tile_column = number % tiles_wide;
    const unsigned first_down = tile_row * blocks_wide, first_across = tile_column * blocks_wide;
    const bool writes_rows = rows.codes != nullptr, writes_columns = columns.codes != nullptr;

    const unsigned own_block = thread % 8, own_row = thread / 32 * block + thread % 32 / 8;  // and + 4, + 8, + 12
    const unsigned across = first_across + own_block;
    const bool inside = across < wide && first_down + thread / 32 < high;
    const size_t own_at = (static_cast<size_t>(tile_row) * side + own_row) * wide + across;  // the first of four blocks
    Fp4Elements own[4] = {};
    if (inside) {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            const uint4* from = x + 2 * (own_at + 4 * i * static_cast<size_t>(wide));
            *reinterpret_cast<uint4*>(own[i].pair) = from[0];
            *reinterpret_cast<uint4*>(own[i].pair + 4) = from[1];
        }
    }
    if (writes_columns) {
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
#pragma unroll
            for (unsigned half = 0; half < 2; ++half) {
                tile[chunk_of(own_row + 4 * i, own_block, half)] = *reinterpret_cast<const uint4*>(own[i].pair + 4 * half);
            }
        }
    }
    if (writes_rows || Square) {
        const Fp4Matrix<FourOverSix> matrix(measured[0]);
        Fp4Scale scale[4];
        scales_of<Square>(own, matrix, scale);
        if (Square && thread % 32 < 8) {
            squares[thread / 32 * blocks_wide + own_block] = scale[0];
        }
        if (writes_rows) {
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                const size_t at = own_at + 4 * i * static_cast<size_t>(wide);
                scales[0][scale_at(own_row + 4 * i, own_block)] = static_cast<uint8_t>(scale[i].code);
                if (inside) {
                    rows.codes[at] = fp4_codes<Stochastic>(own[i], scale[i].factor, random.of<Stochastic>(at, 0));
                }
            }
        }
    }
    __syncthreads();
    if (writes_rows && thread < 64) {
        write_scales(scales[0], rows.scales, tile_row, first_across, wide, thread);
    }
    if (writes_columns) {
        const Fp4Matrix<FourOverSix> matrix(measured[Hadamard ? 2 : 0]);
        const unsigned word = thread % words_wide;
#pragma unroll 1
        for (unsigned down = thread / words_wide; down < blocks_wide; down += threads / words_wide) {
            uint32_t words[block];
#pragma unroll
            for (unsigned i = 0; i < block; ++i) {
                const unsigned chunk = chunk_of(down * block + i, word / 8, word / 4 % 2);
                words[i] = reinterpret_cast<const uint32_t*>(tile + chunk)[word % 4];
            }
            Fp4Elements pair[2];
            fp4_columns<Hadamard>(words, pair);
#pragma unroll
            for (unsigned half = 0; half < 2; ++half) {
                const unsigned own_column = 2 * word + half;
                Fp4Scale scale;
                if constexpr (Square) {
                    scale = squares[down * blocks_wide + own_column / block];
                } else {
                    const auto total = [&](const Fp4Scale& candidate, auto error) { return error(pair[half], candidate); };
                    scale = fp4_scale(pair[half].top(), matrix, total);
                }
                const size_t at = (static_cast<size_t>(tile_column) * side + own_column) * high + first_down + down;
                staged[staged_at(own_column, down)] =
                    fp4_codes<Stochastic>(pair[half], scale.factor, random.of<Stochastic>(at, 1));
                scales[1][scale_at(own_column, down)] = static_cast<uint8_t>(scale.code);
            }
        }
        __syncthreads();
#pragma unroll
        for (unsigned i = 0; i < side * blocks_wide / threads; ++i) {
            const unsigned own_column = (thread + i * threads) / blocks_wide, down = thread % blocks_wide;
            if (first_across + own_column / block < wide && first_down + down < high) {
                const size_t row = static_cast<size_t>(tile_column) * side + own_column;
                columns.codes[row * high + first_down + down] = staged[staged_at(own_column, down)];
            }
        }
        if (thread < 64) {
            write_scales(scales[1], columns.scales, tile_column, first_down, high, thread);
        }
    }
    if (number == 0 && thread == 0) {
        if (writes_rows) {
            publish<FourOverSix>(rows.amax, measured);
        }
        if (writes_columns) {
            publish<FourOverSix>(columns.amax, measured + (Hadamard ? 2 : 0));
        }
    }
}

// Raises measured[0] by the `count` times eight elements of x.
__global__ void __launch_bounds__(threads) measure_kernel(const uint4* __restrict__ x, float* measured, int64_t count) {
    constexpr int batch = 4;
    __shared__ uint32_t tops[threads / 32];
    AbsMax top;
    const int64_t step = static_cast<int64_t>(gridDim.x) * threads;
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x; at < count; at += batch * step) {
        Packed<__nv_bfloat16, 8> octet[batch] = {};
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (at + i * step < count) {
                octet[i].word = x[at + i * step];
            }
        }
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            top.add(octet[i]);
        }
    }
    top.stage(tops);
    __syncthreads();
    AbsMax::raise(tops, measured);
}

// Raises measured[0] by x, and measured[2] by its transpose after the Hadamard transform. A thread has two columns of 16
// rows, `count` of them in all, and a warp reads 128 adjacent bytes.
__global__ void __launch_bounds__(threads, 4)
    measure_hadamard_kernel(const uint32_t* __restrict__ x, float* measured, unsigned words, unsigned count) {
    __shared__ uint32_t tops[2][threads / 32];
    AbsMax top, top_of_columns;
    const unsigned step = gridDim.x * threads;
    for (int64_t at = blockIdx.x * threads + threadIdx.x; at < count; at += step) {
        const unsigned group = static_cast<unsigned>(at) / words, word = static_cast<unsigned>(at) % words;
        const uint32_t* from = x + static_cast<int64_t>(group) * fp4_block * words + word;
        uint32_t pairs[fp4_block];
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            pairs[i] = from[static_cast<int64_t>(i) * words];
        }
        Fp4Elements columns[2];
        fp4_columns<true>(pairs, columns);
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            top.add(pairs[i]);
            top_of_columns.add(columns[i / 8].pair[i % 8]);
        }
    }
    top.stage(tops[0]);
    top_of_columns.stage(tops[1]);
    __syncthreads();
    AbsMax::raise(tops[0], measured);
    AbsMax::raise(tops[1], measured + 2);
}

void measure(const void* x, float* measured, int64_t n_rows, int64_t n_columns, bool hadamard, cudaStream_t stream) {
    constexpr int64_t max_blocks = 1056;  // 8 for each SM of an H200
    check_cuda(cudaMemsetAsync(measured, 0, 16, stream), op);
    if (hadamard) {
        const int64_t words = n_columns / 2, count = n_rows / fp4_block * words;
        const auto grid = static_cast<unsigned>(std::min(ceil_div(count, threads), max_blocks));
        measure_hadamard_kernel<<<grid, threads, 0, stream>>>(static_cast<const uint32_t*>(x), measured,
                                                              static_cast<unsigned>(to_int(words, op, "columns")),
                                                              static_cast<unsigned>(to_int(count, op, "elements / 32")));
    } else {
        const int64_t count = n_rows * n_columns / 8;
        const auto grid = static_cast<unsigned>(std::min(ceil_div(count, 4 * threads), max_blocks));
        measure_kernel<<<grid, threads, 0, stream>>>(static_cast<const uint4*>(x), measured, count);
    }
    check_launch(op);
}

Form checked(const Fp4Form& form, const char* codes, const char* scales, const char* amax) {
    if (form.codes != nullptr) {
        check_pointer(form.codes, op, codes, 16);
        check_pointer(form.scales, op, scales, 16);
        check_pointer(form.amax, op, amax, 8);
    }
    return {static_cast<uint2*>(form.codes), static_cast<uint8_t*>(form.scales), static_cast<float*>(form.amax)};
}

using Kernel = void (*)(const uint4*, Form, Form, const float*, Random, unsigned, unsigned, unsigned);

template <bool FourOverSix>
Kernel kernel_of(const Fp4Quantization& how) {
    if (how.square) {
        return quantize_kernel<true, false, FourOverSix, false>;
    }
    if (how.stochastic) {
        return how.hadamard ? quantize_kernel<false, true, FourOverSix, true> : quantize_kernel<false, false, FourOverSix, true>;
    }
    return how.hadamard ? quantize_kernel<false, true, FourOverSix, false> : quantize_kernel<false, false, FourOverSix, false>;
}

}  // namespace

void nvfp4_quantize(const void* x, const Fp4Form& rows, const Fp4Form& columns, void* measured, int64_t n_rows,
                    int64_t n_columns, const Fp4Quantization& how, cudaStream_t stream) {
    for (const auto& [size, name] : {std::pair(n_rows, "rows"), std::pair(n_columns, "columns")}) {
        check_positive(size, op, name);
        SUROGATE_REQUIRE(size % fp4_block == 0, op,
                         std::string(name) + " must be a multiple of 16, got " + std::to_string(size));
    }
    check_pointer(x, op, "x", 16);
    check_pointer(measured, op, "workspace", 16);
    SUROGATE_REQUIRE(rows.codes != nullptr || columns.codes != nullptr, op, "no form is written");
    SUROGATE_REQUIRE(!how.square || !(how.hadamard || how.stochastic), op,
                     "square blocks are neither transformed nor rounded stochastically");
    SUROGATE_REQUIRE(how.first_row >= 0 && how.first_row % fp4_block == 0, op,
                     "the first row must be a multiple of 16, got " + std::to_string(how.first_row));
    if (how.stochastic) {
        check_pointer(how.micro_step, op, "micro_step", 4);
        check_pointer(how.seed, op, "seed", 8);
    }
    const Form row_form = checked(rows, "codes of the rows", "scales of the rows", "amax of the rows");
    const Form column_form = checked(columns, "codes of the columns", "scales of the columns", "amax of the columns");
    const int64_t tiles_wide = ceil_div(n_columns, side);
    const int tiles = to_int(tiles_wide * ceil_div(n_rows, side), op, "tiles");
    const auto high = static_cast<unsigned>(n_rows / block), wide = static_cast<unsigned>(n_columns / block);
    const bool hadamard = how.hadamard && columns.codes != nullptr;
    auto* amax = static_cast<float*>(measured);
    if (!how.is_measured) {
        measure(x, amax, n_rows, n_columns, hadamard, stream);
    }
    const Random random{static_cast<const int32_t*>(how.micro_step), static_cast<const int64_t*>(how.seed),
                        static_cast<uint32_t>(how.stream), how.first_row / block * n_columns};
    const Kernel kernel = how.four_over_six ? kernel_of<true>(how) : kernel_of<false>(how);
    kernel<<<static_cast<unsigned>(tiles), threads, 0, stream>>>(static_cast<const uint4*>(x), row_form, column_form, amax,
                                                                 random, high, wide, static_cast<unsigned>(tiles_wide));
    check_launch(op);
}

}  // namespace surogate
