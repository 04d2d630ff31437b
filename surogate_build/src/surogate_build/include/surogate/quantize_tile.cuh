// The parts that kernels share which read a matrix once and write it in one byte per element or less, row by row and
// transposed, together with its largest absolute value:
//
//   QuantizeTile<64, 128>        which elements of a tile a thread has, and the byte transpose through shared memory
//   AbsMax                       the largest finite absolute value and whether there was another
//   transpose_bytes              4 x 4 bytes in registers
//
// What a byte is, and where the values come from, is decided by the kernel:
//
//   using Tile = QuantizeTile<64, 128>;
//   __shared__ __align__(16) uint32_t staged[Tile::words];
//   __shared__ uint32_t tops[Tile::threads / 32];
//   const int64_t row = first_row + Tile::row(), column = first_column + Tile::column();
//   uint32_t bytes[4][2];                       // this thread's rows `row` to `row + 3`, columns `column` to `column + 7`
//   AbsMax top;
//   ...                                         // load, top.add(value), quantize, store `bytes` row by row
//   Tile::stage(staged, bytes);
//   top.stage(tops);
//   __syncthreads();
//   Tile::write(staged, transposed, first_row, first_column, rows, columns);
//   AbsMax::raise(tops, amax);
//
// The numbers of rows and columns of the matrix are multiples of 16, and buffers are aligned to 16 bytes. A warp has 16
// rows and 8 * Width columns of the tile. It reads and writes whole 32-byte sectors, and its accesses to shared memory
// have no bank conflicts. A transposed row of the tile has `Rows` bytes, which should be whole sectors too: 32 or more.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "surogate/vec.cuh"

namespace surogate {

// Transposes 4 x 4 bytes: byte j of word i becomes byte i of word j.
__device__ __forceinline__ void transpose_bytes(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_low, cd_low, 0x5410);
    b = __byte_perm(ab_low, cd_low, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410);
    d = __byte_perm(ab_high, cd_high, 0x7632);
}

// A tile of Rows x Columns elements. Each thread has four rows of Width adjacent columns.
template <int Rows, int Columns, int Width = 8>
struct QuantizeTile {
    static_assert(Rows % 16 == 0 && Columns % (8 * Width) == 0 && Width % 4 == 0);

    static constexpr int rows = Rows;
    static constexpr int columns = Columns;
    static constexpr int threads = Rows / 4 * (Columns / Width);

    // Words of shared memory that hold the transposed bytes: four more for every Width columns avoid bank conflicts.
    static constexpr int words = Rows / 4 * Columns + Columns / Width * 4;

    // Returns this thread's first row in the tile, a multiple of 4.
    static __device__ __forceinline__ int row() {
        return static_cast<int>(threadIdx.x) / 32 / kWarpsWide * 16 + static_cast<int>(threadIdx.x) % 32 / 8 * 4;
    }

    // Returns this thread's first column in the tile, a multiple of Width.
    static __device__ __forceinline__ int column() {
        return (static_cast<int>(threadIdx.x) / 32 % kWarpsWide * 8 + static_cast<int>(threadIdx.x) % 8) * Width;
    }

    // Writes this thread's elements, one byte each, to shared memory: `bytes[i]` are Width bytes of row i.
    static __device__ __forceinline__ void stage(uint32_t* staged, const uint32_t (&bytes)[4][Width / 4]) {
        uint32_t* to = staged + word_of(column()) + row() / 4;
#pragma unroll
        for (int k = 0; k < Width / 4; ++k) {
            uint32_t a = bytes[0][k], b = bytes[1][k], c = bytes[2][k], d = bytes[3][k];
            transpose_bytes(a, b, c, d);
            to[(4 * k + 0) * kWordsPerColumn] = a;
            to[(4 * k + 1) * kWordsPerColumn] = b;
            to[(4 * k + 2) * kWordsPerColumn] = c;
            to[(4 * k + 3) * kWordsPerColumn] = d;
        }
    }

    // Writes the staged tile, whose first element is (first_row, first_column), into the transposed matrix, which has
    // `n_columns` rows of `n_rows` bytes. The block must have synchronized after `stage`.
    static __device__ __forceinline__ void write(const uint32_t* staged, uint8_t* transposed, int64_t first_row,
                                                 int64_t first_column, int64_t n_rows, int64_t n_columns) {
        constexpr int pieces = Rows / 16, step = threads / pieces;  // columns of the tile between those of a thread
        static_assert(step % Width == 0);
        const int row = static_cast<int>(threadIdx.x) % pieces * 16, first = static_cast<int>(threadIdx.x) / pieces;
        if (first_row + row >= n_rows) {
            return;
        }
        const int left = static_cast<int>(n_columns - first_column < Columns ? n_columns - first_column : Columns);
        const uint32_t* from = staged + word_of(first) + row / 4;
        uint8_t* to = transposed + (first_column + first) * n_rows + first_row + row;
#pragma unroll
        for (int k = 0; k < Width / 4; ++k, to += step * n_rows) {
            if (first + k * step < left) {
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + word_of(k * step));
            }
        }
    }

private:
    static constexpr int kWarpsWide = Columns / (8 * Width);
    static constexpr int kWordsPerColumn = Rows / 4;

    // Returns the index of the first word of a column.
    static __device__ __forceinline__ int word_of(int column) {
        return column * kWordsPerColumn + column / Width * 4;
    }
};

// The largest finite |x| of the values that were added, as the bits of a float, and whether one was not finite.
//
// Bit patterns of non-negative floats order as integers. With 1 added to the exponent, infinities and NaN become negative
// integers, so a signed maximum leaves them out. Two bf16 take four instructions.
class AbsMax {
public:
    // Adds two bf16.
    __device__ __forceinline__ void add(uint32_t pair) {
        const uint32_t shifted = (pair & 0x7fff7fffu) + kPairBias;
        pair_ = __vmaxs2(pair_, shifted);
        signs_ |= shifted;
    }

    __device__ __forceinline__ void add(float x) {
        const uint32_t shifted = (__float_as_uint(x) & 0x7fffffffu) + kBias;
        single_ = max(single_, static_cast<int>(shifted));
        signs_ |= shifted & 0x80000000u;
    }

    __device__ __forceinline__ void add(const Packed<__nv_bfloat16, 8>& values) {
        add(values.word.x);
        add(values.word.y);
        add(values.word.z);
        add(values.word.w);
    }

    // Writes the result of each warp to `tops`, which has a word per warp of the block. All threads call it.
    __device__ __forceinline__ void stage(uint32_t* tops) const {
        const uint32_t high = (pair_ >> 16) - (kPairBias >> 16), low = (pair_ & 0xffffu) - (kPairBias & 0xffffu);
        const uint32_t finite = max(max(high, low) << 16, static_cast<uint32_t>(single_) - kBias);
        const uint32_t top = __reduce_max_sync(0xffffffffu, finite);
        const bool other = __any_sync(0xffffffffu, (signs_ & 0x80008000u) != 0);
        if (threadIdx.x % 32 == 0) {
            tops[threadIdx.x / 32] = other ? top | kNonFinite : top;
        }
    }

    // Raises amax[0] to the largest finite value of the block, and sets amax[1] to 1 if there was another. The block must
    // have synchronized after `stage`. amax[0] must be finite and not negative.
    static __device__ __forceinline__ void raise(const uint32_t* tops, float* amax) {
        if (threadIdx.x >= 32) {
            return;
        }
        const uint32_t mine = threadIdx.x < blockDim.x / 32 ? tops[threadIdx.x] : 0;
        const uint32_t top = __reduce_max_sync(0xffffffffu, mine & ~kNonFinite);
        const bool other = __any_sync(0xffffffffu, (mine & kNonFinite) != 0);
        if (threadIdx.x == 0) {
            raise(amax, __uint_as_float(top), other);
        }
    }

    // Raises amax[0] to `top`, and sets amax[1] to 1 if `non_finite`.
    static __device__ __forceinline__ void raise(float* amax, float top, bool non_finite) {
        atomicMax(reinterpret_cast<int*>(amax), __float_as_int(top));
        if (non_finite) {
            amax[1] = 1.0f;
        }
    }

private:
    static constexpr uint32_t kPairBias = 0x00800080u;
    static constexpr uint32_t kBias = 0x00800000u;
    static constexpr uint32_t kNonFinite = 0x80000000u;

    uint32_t pair_ = kPairBias;
    int single_ = static_cast<int>(kBias);
    uint32_t signs_ = 0;
};

}  // namespace surogate
