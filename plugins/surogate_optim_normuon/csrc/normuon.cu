// normuon: the element-wise parts of a step of NorMuon (arXiv 2510.05491) for a batch of matrices of equal shape. The
// products between them, which orthogonalize the matrices, are those of <surogate/gemm.h>.
//
//   momentum     g = clip_coef * grad;  m = b1 m + (1 - b1) g;  x = (1 - b1) g + b1 m, bf16, before m is rounded
//   normalize    x /= safety * ||x|| + epsilon
//                products: five times a = x x^T, b = beta a + gamma a a, x' = alpha x + b x; or x^T x and x b, if a
//                matrix has more rows than columns. The last x is o.
//   mirror       a[i, j] = a[j, i] where panel i / height is before panel j / height: a symmetric product is computed in
//                panels of rows, each up to the diagonal
//   row_moments  v = b2 v + (1 - b2) mean of o^2 over the row;  r = 1 / (sqrt(v) + 1e-10)
//   update       u = o * r * ||o|| / (||o * r|| + 1e-10) * factor
//                p -= lr wd p, if `cautious` only where u p >= 0;  p -= lr u
//
// Arithmetic is fp32. That of `momentum` is rounded after each operation, in the order of
// `surogate_optim_normuon.reference:normuon`, so momenta are bit-identical to it. bf16 masters and momenta are stored with
// stochastic rounding: Philox with the key `seed` and the counter (index of the eight elements in the param, stream of the
// value, step), as in philox.cuh. If clip_coef is not finite, nothing but x, r, the sums and the amaxes are written.
//
//   table      [count] entries of 8 int64 words, see Entry: addresses within params that may have other matrices too;
//              grad, master, m and copy [rows, columns], each fp32 or bf16; v fp32 [rows]; copy, which receives the
//              stored master rounded to nearest, and amax may be null. An amax is a maximum over all matrices of its
//              param, NaN if an element is NaN. `clear` sets it to 0.
//   x, o       bf16 [count, rows', columns'], the sizes rounded up to multiples of 8, padded with zeros, which the
//              products keep; aligned to 16 bytes
//   square     bf16 [count, side, side], aligned to 16 bytes; side and height are multiples of 64
//   norms      fp32 [count, chunks]: sums of x^2 before it is rounded, of 32,768 elements each
//   scales     fp32 [count, rows]: r
//   sums       fp32 [count, blocks, 2]: sums of o^2 and (o r)^2, of 16 rows each
//   clip_coef, lr  fp32 scalars; step int32 scalar, 1 at the first step; seed int64 scalar; all in device memory
//
// Any rows and columns. Octets of a row are loaded as words if columns is a multiple of 8 and all addresses are aligned to
// 16 bytes, else element by element, at a fraction of the speed. Grid: (chunk or 16 rows, matrix). All sums are made in
// an order that depends on rows and columns alone, so bits do not depend on the batch or on timing.
//
// Bytes moved per element: momentum 14 with fp32 throughout, 8 with bf16 throughout; normalize 4; row_moments 2; update 10
// or 6, and 2 or 4 with a copy. That is 30 or 20. FLOPs of the products, with m <= n: 5 (4 m^2 n + 2 m^3); with the
// symmetric ones in two panels, 5 (3.5 m^2 n + 1.5 m^3).
// Qwen3-8B has 6.95e9 elements in matrices of its blocks: 208 or 139 GB, 49 or 33 ms at 4.26 TB/s. Its products have 675
// TFLOP, in panels 576, 0.82 s at the 700 TFLOP/s of a plain product under the power limit (4096 x 12288, of which there
// are 108: 4.12 TFLOP each; 4096 x 4096, 72: 1.72; 1024 x 4096, 72: 0.097, not in panels). A step of 32,768 tokens has
// 1,610 TFLOP, 2.3 s, so this is a quarter of the sum; of half a million tokens, 2 %. Qwen3-0.6B: 11 TFLOP, 16 ms, and 2 to
// 3 ms of bytes. Mirroring moves 2 m^2 bytes a product, 17 MB for m = 4096: 1 % of the time of the products.
//
// Measured on an H200, a third of 8B in bf16, by torch's profiler: momentum 5.4 ms (3.4 TB/s), normalize 2.6 (3.6), row_moments
// 1.5 (3.2), update 5.3 (2.6), mirror 5.1 (1.8 % of the products' 272 ms).
#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

#include "normuon.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"
#include "surogate/philox.cuh"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"
#include "surogate/words.cuh"

namespace surogate {
namespace {

constexpr const char* op = "normuon";
constexpr int threads = 256;
constexpr int warps = threads / 32;
constexpr int octets_per_chunk = 4096;
constexpr int rows_per_block = 16;
constexpr int mirror_tile = 64;
constexpr float tiny = 1e-10f;

// Philox streams of the two values of a param, as in the reference.
constexpr uint32_t master_stream = 0;
constexpr uint32_t momentum_stream = 0x9E3779B9u;

struct Entry {
    const void* grad;
    void* master;
    void* m;
    float* v;
    void* copy;      // null if the master is the param itself
    uint32_t* amax;  // bits of a non-negative float; null if nobody reads it
    int64_t first;   // index in the param of the first element
    int64_t stream;
};
static_assert(sizeof(Entry) == 8 * sizeof(int64_t));

// The shape of a matrix, and of its padded copies in octets.
struct Shape {
    int rows, columns;
    int row_octets;
    uint32_t octets;

    int chunks() const { return static_cast<int>(ceil_div(octets, octets_per_chunk)); }
    int row_blocks() const { return static_cast<int>(ceil_div(rows, rows_per_block)); }
};

// What is left of an octet of a padded matrix in the matrix itself: up to eight elements.
struct Part {
    int row;
    int64_t first;  // index in the matrix
    int count;
};

__device__ __forceinline__ Part part_of(const Shape& shape, uint32_t index) {
    const uint32_t row = index / shape.row_octets;
    const int column = static_cast<int>(index - row * shape.row_octets) * octet;
    const int count = row < shape.rows ? min(octet, shape.columns - column) : 0;
    return {static_cast<int>(row), static_cast<int64_t>(row) * shape.columns + column, max(count, 0)};
}

// Whole: all eight elements exist and are aligned to 16 bytes.
template <bool Whole, class T>
__device__ __forceinline__ Words<T> load(const void* base, const Part& part) {
    if constexpr (Whole) {
        return Words<T>::load(base, part.first);
    } else {
        float x[octet];
        load_octet(static_cast<const T*>(base) + part.first, x, part.count, false);
        return Words<T>::nearest(x);
    }
}

template <bool Whole, class T>
__device__ __forceinline__ void store(void* base, const Part& part, const Words<T>& words) {
    if constexpr (Whole) {
        words.store(base, part.first);
    } else {
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            if (i < part.count) {
                static_cast<T*>(base)[part.first + i] = from_float<T>(words.get(i));
            }
        }
    }
}

struct Random {
    int64_t seed;
    int32_t step;
};

// Rounds stochastically to T. `first` is the index in the param of the first element.
template <bool Whole, class T>
__device__ __forceinline__ Words<T> rounded(float (&x)[octet], const Random& random, int64_t first, uint32_t stream) {
    if constexpr (sizeof(T) == sizeof(__nv_bfloat16)) {
        PhiloxWords bits{};
        if constexpr (Whole) {
            bits = random_halves(first / octet, random.seed, stream, random.step);
        }
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            const uint16_t half = Whole ? bits.half(i) : random_half(first + i, random.seed, stream, random.step);
            x[i] = __bfloat162float(stochastic_round_bf16(x[i], half));
        }
    }
    return Words<T>::nearest(x);
}

template <class... Pointers>
__device__ __forceinline__ bool is_whole(const Shape& shape, Pointers... pointers) {
    return shape.columns % octet == 0 && ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

// Calls `of_octet` for the indices of this thread in the chunk of this block.
template <class Function>
__device__ __forceinline__ void for_chunk(const Shape& shape, Function&& of_octet) {
    const uint32_t begin = blockIdx.x * octets_per_chunk;
    const uint32_t end = min(begin + octets_per_chunk, shape.octets);
    for (uint32_t index = begin + threadIdx.x; index < end; index += threads) {
        of_octet(index);
    }
}

// Returns a sum over `count` elements, the same in every thread.
__device__ __forceinline__ float block_total(const float* values, int count, int stride) {
    __shared__ float scratch[32];
    float sum = 0;
    for (int i = threadIdx.x; i < count; i += threads) {
        sum += values[static_cast<int64_t>(i) * stride];
    }
    return block_sum(sum, scratch);
}

__global__ void __launch_bounds__(threads) clear_kernel(uint32_t* const* table, int count) {
    for (int i = threadIdx.x; i < count; i += threads) {
        *table[i] = 0;
    }
}

struct Momentum {
    float coef, beta, rest;
    Random random;
};

// Returns the sum of squares of the octets of this thread.
template <bool Whole, class G, class S>
__device__ __forceinline__ float momentum_of_chunk(const Entry& entry, const Shape& shape, const Momentum& f,
                                                   __nv_bfloat16* x) {
    float squares = 0;
    for_chunk(shape, [&](uint32_t index) {
        const Part part = part_of(shape, index);
        float u[octet] = {};
        if (part.count > 0) {
            const Words<G> g = load<Whole, G>(entry.grad, part);
            const Words<S> old = load<Whole, S>(entry.m, part);
            float m[octet];
#pragma unroll
            for (int i = 0; i < octet; ++i) {
                const float rest = __fmul_rn(__fmul_rn(g.get(i), f.coef), f.rest);
                m[i] = __fadd_rn(__fmul_rn(old.get(i), f.beta), rest);
                u[i] = __fadd_rn(rest, __fmul_rn(m[i], f.beta));
                squares = fmaf(u[i], u[i], squares);
            }
            if (isfinite(f.coef)) {
                const uint32_t stream = static_cast<uint32_t>(entry.stream) ^ momentum_stream;
                store<Whole>(entry.m, part, rounded<Whole, S>(m, f.random, entry.first + part.first, stream));
            }
        }
        Words<__nv_bfloat16>::nearest(u).store(x, static_cast<int64_t>(index) * octet);
    });
    return squares;
}

template <class G, class S>
__global__ void __launch_bounds__(threads, 4)
    momentum_kernel(const Entry* table, Shape shape, const float* clip_coef, const int32_t* step, const int64_t* seed,
                    __nv_bfloat16* x, float* norms, float beta, float rest) {
    __shared__ float scratch[32];
    const Entry& entry = table[blockIdx.y];
    const Momentum f{*clip_coef, beta, rest, {*seed, *step}};
    x += static_cast<int64_t>(blockIdx.y) * shape.octets * octet;
    const float squares = is_whole(shape, entry.grad, entry.m) ? momentum_of_chunk<true, G, S>(entry, shape, f, x)
                                                               : momentum_of_chunk<false, G, S>(entry, shape, f, x);
    const float sum = block_sum(squares, scratch);
    if (threadIdx.x == 0) {
        norms[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
    }
}

__global__ void __launch_bounds__(threads)
    normalize_kernel(Shape shape, __nv_bfloat16* x, const float* norms, float safety, float epsilon) {
    const float norm = sqrtf(block_total(norms + static_cast<int64_t>(blockIdx.y) * gridDim.x, gridDim.x, 1));
    const float inverse = 1.0f / (norm * safety + epsilon);
    x += static_cast<int64_t>(blockIdx.y) * shape.octets * octet;
    for_chunk(shape, [&](uint32_t index) {
        const int64_t first = static_cast<int64_t>(index) * octet;
        const auto words = Words<__nv_bfloat16>::load(x, first);
        float u[octet];
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            u[i] = words.get(i) * inverse;
        }
        Words<__nv_bfloat16>::nearest(u).store(x, first);
    });
}

// Copies a tile of a panel, transposed, to the panel of an earlier row.
__global__ void __launch_bounds__(threads) mirror_kernel(__nv_bfloat16* square, int side, int height) {
    __shared__ __nv_bfloat16 tile[mirror_tile][mirror_tile + 2];  // columns in different banks
    constexpr int tile_octets = mirror_tile / octet;
    const int tiles = side / mirror_tile;
    const int row = static_cast<int>(blockIdx.x) / tiles * mirror_tile;
    const int column = static_cast<int>(blockIdx.x) % tiles * mirror_tile;
    if (row / height <= column / height) {
        return;
    }
    square += static_cast<int64_t>(blockIdx.y) * side * side;
    for (int i = threadIdx.x; i < mirror_tile * tile_octets; i += threads) {
        const int r = i / tile_octets, c = i % tile_octets * octet;
        const auto v = Vec<__nv_bfloat16>::load(square + static_cast<int64_t>(row + r) * side + column + c);
#pragma unroll
        for (int j = 0; j < octet; ++j) {
            tile[r][c + j] = v[j];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < mirror_tile * tile_octets; i += threads) {
        const int r = i / tile_octets, c = i % tile_octets * octet;
        Vec<__nv_bfloat16> v;
#pragma unroll
        for (int j = 0; j < octet; ++j) {
            v[j] = tile[c + j][r];
        }
        v.store(square + static_cast<int64_t>(column + r) * side + row + c);
    }
}

// The sum of squares of a row of `octets` octets, in every lane of the warp.
__device__ __forceinline__ float row_squares(const __nv_bfloat16* row, int octets) {
    float squares = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < octets; i += 32) {
        const auto words = Words<__nv_bfloat16>::load(row, static_cast<int64_t>(i) * octet);
#pragma unroll
        for (int j = 0; j < octet; ++j) {
            squares = fmaf(words.get(j), words.get(j), squares);
        }
    }
    return warp_sum(squares);
}

__global__ void __launch_bounds__(threads)
    row_moments_kernel(const Entry* table, Shape shape, const float* clip_coef, const __nv_bfloat16* o, float* scales,
                       float2* sums, float beta, float rest) {
    __shared__ float2 of_row[rows_per_block];
    const Entry& entry = table[blockIdx.y];
    const bool finite = isfinite(*clip_coef);
    o += static_cast<int64_t>(blockIdx.y) * shape.octets * octet;
    scales += static_cast<int64_t>(blockIdx.y) * shape.rows;
    for (int i = threadIdx.x / 32; i < rows_per_block; i += warps) {
        const int row = blockIdx.x * rows_per_block + i;
        float2 sum = {0, 0};
        if (row < shape.rows) {
            const float squares = row_squares(o + static_cast<int64_t>(row) * shape.row_octets * octet, shape.row_octets);
            const float v = entry.v[row] * beta + squares / static_cast<float>(shape.columns) * rest;
            const float scale = 1.0f / (sqrtf(v) + tiny);
            __syncwarp();  // every lane has read v
            if (threadIdx.x % 32 == 0) {
                scales[row] = scale;
                if (finite) {
                    entry.v[row] = v;
                }
            }
            sum = {squares, squares * scale * scale};
        }
        if (threadIdx.x % 32 == 0) {
            of_row[i] = sum;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float2 sum = {0, 0};
        for (int i = 0; i < rows_per_block; ++i) {
            sum.x += of_row[i].x;
            sum.y += of_row[i].y;
        }
        sums[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
    }
}

struct Factors {
    float lr, decay, update;
    bool cautious, finite;
    Random random;
};

// Stands for a dtype where there is no work copy.
struct None {};

template <bool Whole, class P, class C>
__device__ __forceinline__ void update_chunk(const Entry& entry, const Shape& shape, const Factors& f,
                                             const __nv_bfloat16* o, const float* scales, Largest& largest) {
    for_chunk(shape, [&](uint32_t index) {
        const Part part = part_of(shape, index);
        if (part.count == 0) {
            return;
        }
        Words<P> p = load<Whole, P>(entry.master, part);
        if (f.finite) {
            const auto u = Words<__nv_bfloat16>::load(o, static_cast<int64_t>(index) * octet);
            const float scale = scales[part.row] * f.update;
            float x[octet];
#pragma unroll
            for (int i = 0; i < octet; ++i) {
                const float change = u.get(i) * scale;
                const bool decays = !f.cautious || change * p.get(i) >= 0;
                const float decay = decays ? p.get(i) * f.decay : 0.0f;
                x[i] = p.get(i) - f.lr * decay - f.lr * change;
            }
            const uint32_t stream = static_cast<uint32_t>(entry.stream) ^ master_stream;
            p = rounded<Whole, P>(x, f.random, entry.first + part.first, stream);
            store<Whole>(entry.master, part, p);
        }
        if constexpr (sizeof(C) == sizeof(None)) {
            largest.add(p);
        } else {
            float x[octet];
#pragma unroll
            for (int i = 0; i < octet; ++i) {
                x[i] = p.get(i);
            }
            const auto copy = Words<C>::nearest(x);
            if (f.finite) {
                store<Whole>(entry.copy, part, copy);
            }
            largest.add(copy);
        }
    });
}

template <class P, class C>
__global__ void __launch_bounds__(threads, 4)
    update_kernel(const Entry* table, Shape shape, const float* clip_coef, const float* lr, const int32_t* step,
                  const int64_t* seed, const __nv_bfloat16* o, const float* scales, const float* sums, int row_blocks,
                  float decay, bool cautious, float factor, bool divided) {
    const Entry& entry = table[blockIdx.y];
    sums += static_cast<int64_t>(blockIdx.y) * row_blocks * 2;
    const float norm = sqrtf(block_total(sums, row_blocks, 2));
    const float scaled = sqrtf(block_total(sums + 1, row_blocks, 2));
    const float size = divided ? factor / (norm + tiny) : factor;
    const Factors f{*lr, decay, norm / (scaled + tiny) * size, cautious, isfinite(*clip_coef), {*seed, *step}};
    o += static_cast<int64_t>(blockIdx.y) * shape.octets * octet;
    scales += static_cast<int64_t>(blockIdx.y) * shape.rows;
    if (!f.finite && entry.amax == nullptr) {
        return;
    }
    Largest largest;
    if (is_whole(shape, entry.master, entry.copy)) {
        update_chunk<true, P, C>(entry, shape, f, o, scales, largest);
    } else {
        update_chunk<false, P, C>(entry, shape, f, o, scales, largest);
    }
    if (entry.amax != nullptr) {
        __syncwarp();
        const uint32_t top = __reduce_max_sync(full_warp, largest.bits());
        if (threadIdx.x % 32 == 0) {
            atomicMax(entry.amax, top);
        }
    }
}

Shape shape_of(const NormuonBatch& batch) {
    check_pointer(batch.table, op, "table", 8);
    check_positive(batch.count, op, "count");
    check_positive(batch.rows, op, "rows");
    check_positive(batch.columns, op, "columns");
    SUROGATE_REQUIRE(batch.count <= 65535, op, "count must be at most 65535, got " + std::to_string(batch.count));
    const int64_t row_octets = ceil_div(batch.columns, octet);
    const int64_t octets = ceil_div(batch.rows, octet) * octet * row_octets;
    return {to_int(batch.rows, op, "rows"), to_int(batch.columns, op, "columns"),
            to_int(row_octets, op, "columns / 8"), static_cast<uint32_t>(to_int(octets, op, "elements / 8"))};
}

void check_size(int64_t size, int64_t expected, const char* argument) {
    SUROGATE_REQUIRE(size == expected, op,
                     std::string(argument) + " must have " + std::to_string(expected) + " elements, got " +
                         std::to_string(size));
}

template <class T>
const T* scalar(const void* pointer, const char* argument) {
    check_pointer(pointer, op, argument, sizeof(T));
    return static_cast<const T*>(pointer);
}

bool is_bf16(int dtype, const char* argument) {
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op,
                     std::string(argument) + " must be fp32 or bf16, got " + name_of(dtype));
    return dtype == BF16;
}

dim3 grid_of(int blocks, const NormuonBatch& batch) {
    return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(batch.count));
}

}  // namespace

void normuon_clear(const void* table, int64_t count, cudaStream_t stream) {
    check_pointer(table, op, "table", 8);
    check_positive(count, op, "count");
    clear_kernel<<<1, threads, 0, stream>>>(static_cast<uint32_t* const*>(table), to_int(count, op, "count"));
    check_launch(op);
}

void normuon_momentum(const NormuonBatch& batch, const void* clip_coef, const void* step, const void* seed, void* x,
                      void* norms, int64_t norms_size, double momentum, int dtype_grad, int dtype_momentum,
                      cudaStream_t stream) {
    using Half = __nv_bfloat16;
    const Shape shape = shape_of(batch);
    check_pointer(x, op, "x", 16);
    check_pointer(norms, op, "norms", 4);
    check_size(norms_size, batch.count * shape.chunks(), "norms");
    SUROGATE_REQUIRE(momentum >= 0 && momentum < 1, op, "momentum must be in [0, 1), got " + std::to_string(momentum));
    const auto launch = [&](auto kernel) {
        kernel<<<grid_of(shape.chunks(), batch), threads, 0, stream>>>(
            static_cast<const Entry*>(batch.table), shape, scalar<float>(clip_coef, "clip_coef"),
            scalar<int32_t>(step, "step"), scalar<int64_t>(seed, "seed"), static_cast<Half*>(x),
            static_cast<float*>(norms), static_cast<float>(momentum), static_cast<float>(1 - momentum));
    };
    const bool half_grad = is_bf16(dtype_grad, "dtype_grad");
    if (is_bf16(dtype_momentum, "dtype_momentum")) {
        half_grad ? launch(momentum_kernel<Half, Half>) : launch(momentum_kernel<float, Half>);
    } else {
        half_grad ? launch(momentum_kernel<Half, float>) : launch(momentum_kernel<float, float>);
    }
    check_launch(op);
}

void normuon_normalize(const NormuonBatch& batch, void* x, const void* norms, int64_t norms_size, double safety,
                       double epsilon, cudaStream_t stream) {
    const Shape shape = shape_of(batch);
    check_pointer(x, op, "x", 16);
    check_pointer(norms, op, "norms", 4);
    check_size(norms_size, batch.count * shape.chunks(), "norms");
    SUROGATE_REQUIRE(safety > 0 && epsilon > 0, op, "safety and epsilon must be positive");
    normalize_kernel<<<grid_of(shape.chunks(), batch), threads, 0, stream>>>(
        shape, static_cast<__nv_bfloat16*>(x), static_cast<const float*>(norms), static_cast<float>(safety),
        static_cast<float>(epsilon));
    check_launch(op);
}

void normuon_mirror(void* square, int64_t count, int64_t side, int64_t height, cudaStream_t stream) {
    check_pointer(square, op, "square", 16);
    check_positive(count, op, "count");
    SUROGATE_REQUIRE(count <= 65535, op, "count must be at most 65535, got " + std::to_string(count));
    check_positive(height, op, "height");
    SUROGATE_REQUIRE(height % mirror_tile == 0 && side > 0 && side % height == 0, op,
                     "height must be a multiple of 64 and divide side, got " + std::to_string(height) + " and " +
                         std::to_string(side));
    const int64_t tiles = side / mirror_tile;
    const dim3 grid(static_cast<unsigned>(to_int(tiles * tiles, op, "tiles")), static_cast<unsigned>(count));
    mirror_kernel<<<grid, threads, 0, stream>>>(static_cast<__nv_bfloat16*>(square), to_int(side, op, "side"),
                                               static_cast<int>(height));
    check_launch(op);
}

void normuon_row_moments(const NormuonBatch& batch, const void* clip_coef, const void* o, void* scales,
                         int64_t scales_size, void* sums, int64_t sums_size, double beta2, cudaStream_t stream) {
    const Shape shape = shape_of(batch);
    check_pointer(o, op, "o", 16);
    check_pointer(scales, op, "scales", 4);
    check_size(scales_size, batch.count * batch.rows, "scales");
    check_pointer(sums, op, "sums", 8);
    check_size(sums_size, batch.count * shape.row_blocks() * 2, "sums");
    SUROGATE_REQUIRE(beta2 >= 0 && beta2 < 1, op, "beta2 must be in [0, 1), got " + std::to_string(beta2));
    row_moments_kernel<<<grid_of(shape.row_blocks(), batch), threads, 0, stream>>>(
        static_cast<const Entry*>(batch.table), shape, scalar<float>(clip_coef, "clip_coef"),
        static_cast<const __nv_bfloat16*>(o), static_cast<float*>(scales), static_cast<float2*>(sums),
        static_cast<float>(beta2), static_cast<float>(1 - beta2));
    check_launch(op);
}

void normuon_update(const NormuonBatch& batch, const void* clip_coef, const void* lr, const void* step, const void* seed,
                    const void* o, const void* scales, int64_t scales_size, const void* sums, int64_t sums_size,
                    const NormuonUpdate& update, cudaStream_t stream) {
    using Half = __nv_bfloat16;
    const Shape shape = shape_of(batch);
    check_pointer(o, op, "o", 16);
    check_pointer(scales, op, "scales", 4);
    check_size(scales_size, batch.count * batch.rows, "scales");
    check_pointer(sums, op, "sums", 8);
    check_size(sums_size, batch.count * shape.row_blocks() * 2, "sums");
    const auto launch = [&](auto kernel) {
        kernel<<<grid_of(shape.chunks(), batch), threads, 0, stream>>>(
            static_cast<const Entry*>(batch.table), shape, scalar<float>(clip_coef, "clip_coef"),
            scalar<float>(lr, "lr"), scalar<int32_t>(step, "step"), scalar<int64_t>(seed, "seed"),
            static_cast<const Half*>(o), static_cast<const float*>(scales), static_cast<const float*>(sums),
            shape.row_blocks(), static_cast<float>(update.weight_decay), update.cautious,
            static_cast<float>(update.factor), update.divided);
    };
    const bool half = is_bf16(update.dtype_master, "dtype_master");
    if (update.dtype_copy < 0) {
        half ? launch(update_kernel<Half, None>) : launch(update_kernel<float, None>);
    } else if (is_bf16(update.dtype_copy, "dtype_copy")) {
        half ? launch(update_kernel<Half, Half>) : launch(update_kernel<float, Half>);
    } else {
        half ? launch(update_kernel<Half, float>) : launch(update_kernel<float, float>);
    }
    check_launch(op);
}

}  // namespace surogate
