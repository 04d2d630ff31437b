// Products of experts over at most 64 terms that add to a base, by mma.sync, for SM80 and later:
//
//   y [rows,width] = base + x [rows,terms] w_e^T        w [experts*width,terms]
//   dgrad: y       = base + x [rows,terms] w_e          w [experts*terms,width]
//
// All bf16, row-major, contiguous, aligned to 16 bytes; width and terms are multiples of 8. y may be base. Sums are fp32 in one
// order, rounded to bf16, then added to the base in fp32, so results repeat and are those of two ops. Rows are sorted by
// expert: expert e has those from ends[e - 1] to ends[e].
//
// A block has a tile of 128 x 128, a warp 16 rows of it. The base is read first, and arrives while w comes to shared memory
// and the products are computed. Four lanes with a row exchange their sums, so that each has 8 columns of it: 16 bytes.
//
// Grid: (columns / 128, rows / 128 + experts), as in grouped_mma.cu.
//
// Bytes: 4 rows width for base and y, x once for each 128 columns, w once for each 128 rows (both mostly from L2): of 131,072
// rows and 1,536 columns 805 MB, 0.24 ms at 3.35 TB/s. FLOPs: 2 rows width terms, with 16 terms 6.4e9.
#include <cuda_runtime.h>

#include <cstring>
#include <string>

#include "grouped_thin.h"
#include "groups.cuh"
#include "surogate/check.h"
#include "surogate/mma.cuh"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

using T = __nv_bfloat16;
using Octet = Vec<T, 8>;
constexpr const char* op_name = "grouped_thin";
constexpr int threads = 256;
constexpr int side = 128;           // of a tile
constexpr int chunk = Octet::size;  // elements in 16 bytes
constexpr int strip = 32;           // columns that a warp computes at a time: 8 for each of four lanes
constexpr int strips = side / strip;
constexpr int most_terms = 64;

// Word j of lane l becomes word l % 4 of lane l - l % 4 + j: a transpose among four lanes.
__device__ __forceinline__ void exchange(uint32_t (&words)[4]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = (lane & bit) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & bit) == 0) {
                const uint32_t sent = upper ? words[i] : words[i + bit];
                const uint32_t received = __shfl_xor_sync(full_warp, sent, bit);
                if (upper) {
                    words[i] = received;
                } else {
                    words[i + bit] = received;
                }
            }
        }
    }
}

__device__ __forceinline__ uint32_t rounded(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
}

// Steps: of 16 terms. Shared rows of w have 16 bytes more, so that eight rows of ldmatrix use all banks.
template <bool Dgrad, int Steps>
__global__ void __launch_bounds__(threads, 2)
    thin_kernel(const T* x, const T* w, const int32_t* ends, const T* base, T* y, int width, int terms, int experts,
                int begin) {
    constexpr int tile_rows = Dgrad ? Steps * 16 : side, tile_chunks = (Dgrad ? side : Steps * 16) / chunk;
    constexpr int pitch = tile_chunks + 1;
    __shared__ uint4 tile[tile_rows * pitch];
    const Group group = group_of<side>(ends, experts, static_cast<int>(blockIdx.y), begin);
    if (group.tile * side >= group.rows) {
        return;
    }
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, quad = lane / 4, part = lane % 4;
    const int column = static_cast<int>(blockIdx.x) * side;                 // of the tile
    const int row = group.tile * side + thread / 32 * 16 + quad;            // of the group; the other one is 8 below
    const int64_t first = group.start + row;                                // of all rows

    Octet old[strips][2];
#pragma unroll
    for (int i = 0; i < strips; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int c = column + i * strip + part * chunk;
            if (row + half * 8 < group.rows && c < width) {
                old[i][half] = Octet::load(base + (first + half * 8) * width + c);
            }
        }
    }

    const T* matrix = w + static_cast<int64_t>(group.expert) * width * terms;
    for (int i = thread; i < tile_rows * tile_chunks; i += threads) {
        const int r = i / tile_chunks, c = i % tile_chunks;
        const int n = column + (Dgrad ? c * chunk : r), t = Dgrad ? r : c * chunk;
        const bool exists = n < width && t < terms;
        const int64_t at = Dgrad ? static_cast<int64_t>(t) * width + n : static_cast<int64_t>(n) * terms + t;
        copy_async(tile + r * pitch + c, exists ? matrix + at : matrix, exists);
    }
    commit_copies();

    uint32_t part_x[Steps][4];  // rows, rows + 8, then the next 8 terms
#pragma unroll
    for (int step = 0; step < Steps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = i % 2 * 8, t = step * 16 + i / 2 * 8 + part * 2;
            const bool exists = row + r < group.rows && t < terms;
            part_x[step][i] = exists ? *reinterpret_cast<const uint32_t*>(x + (first + r) * terms + t) : 0;
        }
    }
    wait_copies<0>();
    __syncthreads();

    const int low = lane / 8 % 2, high = lane / 16;  // of the four matrices of ldmatrix: 0 or 1
#pragma unroll
    for (int i = 0; i < strips; ++i) {
        float sums[4][4] = {};
#pragma unroll
        for (int step = 0; step < Steps; ++step) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {  // matrices: terms, the next 8 terms, then columns + 8
                const int at = i * strip + j * 16;
                const int from = Dgrad ? (step * 16 + low * 8 + lane % 8) * pitch + at / chunk + high
                                       : (at + high * 8 + lane % 8) * pitch + step * 2 + low;
                uint32_t part_w[4];
                load_matrices<Dgrad>(part_w, tile + from);
                multiply_add(sums[j * 2], part_x[step], part_w[0], part_w[1]);
                multiply_add(sums[j * 2 + 1], part_x[step], part_w[2], part_w[3]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                words[j] = rounded(sums[j][half * 2], sums[j][half * 2 + 1]);
            }
            exchange(words);
            const int c = column + i * strip + part * chunk;
            if (row + half * 8 < group.rows && c < width) {
                Octet product;
                memcpy(&product, words, sizeof(words));
                float sum[chunk], added[chunk];
                product.to_float(sum);
                old[i][half].to_float(added);
#pragma unroll
                for (int e = 0; e < chunk; ++e) {
                    sum[e] += added[e];
                }
                Octet::from_float(sum).store(y + (first + half * 8) * width + c);
            }
        }
    }
}

using Kernel = void (*)(const T*, const T*, const int32_t*, const T*, T*, int, int, int, int);

template <bool Dgrad>
Kernel kernel_of(int64_t steps) {
    constexpr Kernel of_steps[] = {thin_kernel<Dgrad, 1>, thin_kernel<Dgrad, 2>, thin_kernel<Dgrad, 3>, thin_kernel<Dgrad, 4>};
    return of_steps[steps - 1];
}

}  // namespace

void grouped_thin(const void* x, const void* w, const void* ends, const void* base, void* y, int64_t rows, int64_t width,
                  int64_t terms, int64_t experts, bool dgrad, int64_t begin, cudaStream_t stream) {
    check_positive(rows, op_name, "rows");
    for (const int64_t size : {width, terms}) {
        SUROGATE_REQUIRE(size > 0 && size % chunk == 0, op_name,
                         "width and terms must be multiples of 8, got " + std::to_string(size));
    }
    SUROGATE_REQUIRE(terms <= most_terms, op_name, "at most 64 terms, got " + std::to_string(terms));
    SUROGATE_REQUIRE(experts > 0 && experts <= 65535, op_name, "experts must be 1 to 65535, got " + std::to_string(experts));
    const int64_t tiles = tiles_of_groups(rows, side, experts);
    SUROGATE_REQUIRE(tiles <= 65535, op_name, "too many rows, got " + std::to_string(rows));
    check_pointer(x, op_name, "x", 16);
    check_pointer(w, op_name, "w", 16);
    check_pointer(ends, op_name, "ends", 4);
    check_pointer(base, op_name, "base", 16);
    check_pointer(y, op_name, "y", 16);
    const dim3 grid(static_cast<unsigned>(ceil_div(to_int(width, op_name, "width"), side)), static_cast<unsigned>(tiles));
    const Kernel kernel = dgrad ? kernel_of<true>(ceil_div(terms, 16)) : kernel_of<false>(ceil_div(terms, 16));
    kernel<<<grid, threads, 0, stream>>>(static_cast<const T*>(x), static_cast<const T*>(w), static_cast<const int32_t*>(ends),
                                         static_cast<const T*>(base), static_cast<T*>(y), static_cast<int>(width),
                                         static_cast<int>(terms), static_cast<int>(experts), to_int(begin, op_name, "begin"));
    check_launch(op_name);
}

}  // namespace surogate
