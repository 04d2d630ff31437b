// linear_bgrad: dbias [N] (+)= sum over t of dy[t, n]; dy [T, N] row-major.
//
// dy is fp32 or bf16. dbias is fp32 (written or accumulated into) or bf16 (written); it is rounded once. Workspace:
// fp32 [slabs, N], slabs = min(128, ceil(T / 64)), aligned to 16 bytes. Other pointers are aligned to their element. dy
// is read in 16-byte vectors if it is aligned to 16 bytes and its rows are a multiple of 16 bytes.
//
// Stage 1: a block of 8 warps sums 32 vectors of columns over one slab of rows. Warp w sums the rows w, w + 8, ...; the
// block adds the sums of its warps in order. Stage 2: thread row y of 32 sums the partials y, y + 32, ...; the block
// adds these sums in order. Results do not depend on the GPU or on timing.
//
// Bytes moved: dy once; the partials add less than 2 % (one fp32 row per at least 64 rows). Expected: 80-85 % of
// bandwidth for T >= 4096.
#include "column_sum.h"

#include <surogate/dispatch.cuh>
#include <surogate/reduce.cuh>
#include <surogate/sum_partials.cuh>

#include <algorithm>

#include "norms.h"

namespace surogate {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxSlabs = 128;
constexpr int kRowsPerSlab = 64;

template <class T, int N, bool Scaled>
__global__ void __launch_bounds__(32 * kWarps)
    partials_kernel(const T* dy, const T* x, const float* rstd, float* partials, int64_t rows, int64_t columns) {
    using V = Vec<T, N>;
    constexpr int tile = 32 * N;
    __shared__ float sums[kWarps][tile];
    const int64_t begin = blockIdx.y * rows / gridDim.y;
    const int64_t end = (blockIdx.y + int64_t{1}) * rows / gridDim.y;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * tile;
    const int64_t column = first + threadIdx.x * N;
    float sum[N] = {};
    if (column < columns) {
#pragma unroll 4
        for (int64_t row = begin + threadIdx.y; row < end; row += kWarps) {
            float d[N];
            V::load(dy + row * columns + column).to_float(d);
            if constexpr (Scaled) {
                float values[N];
                V::load(x + row * columns + column).to_float(values);
                const float r = rstd[row];
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    d[i] *= values[i] * r;
                }
            }
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sum[i] += d[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sums[threadIdx.y][threadIdx.x * N + i] = sum[i];
    }
    __syncthreads();
    for (int c = threadIdx.y * 32 + threadIdx.x; c < tile && first + c < columns; c += 32 * kWarps) {
        float total = sums[0][c];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
            total += sums[w][c];
        }
        partials[blockIdx.y * columns + first + c] = total;
    }
}

}  // namespace

int64_t column_slabs(int64_t rows) { return std::min<int64_t>(kMaxSlabs, ceil_div(rows, kRowsPerSlab)); }

void column_partials(const void* dy, const void* x, const void* rstd, float* partials, int64_t rows, int64_t columns,
                     int dtype, const char* op, cudaStream_t stream) {
    with_float_type(dtype, op, "dy", [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int n = vector_width<T>;
        const bool wide = columns % n == 0 && all_aligned({dy, x});
        const auto kernel = x == nullptr ? (wide ? partials_kernel<T, n, false> : partials_kernel<T, 1, false>)
                                         : (wide ? partials_kernel<T, n, true> : partials_kernel<T, 1, true>);
        const int tiles = to_int(ceil_div(columns, 32 * (wide ? n : 1)), op, "columns / 32");
        const dim3 grid(tiles, static_cast<unsigned>(column_slabs(rows)));
        kernel<<<grid, dim3(32, kWarps), 0, stream>>>(static_cast<const T*>(dy), static_cast<const T*>(x),
                                                      static_cast<const float*>(rstd), partials, rows, columns);
    });
    check_launch(op);
}

void linear_bgrad(const void* dy, void* dbias, void* workspace, int64_t workspace_bytes, int64_t rows, int64_t columns,
                  bool accumulate, int dtype, int dtype_dbias, cudaStream_t stream) {
    constexpr const char* op = "linear_bgrad";
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    check_pointer(dy, op, "dy", bytes_of(dtype));
    check_pointer(dbias, op, "dbias", bytes_of(dtype_dbias));
    check_pointer(workspace, op, "workspace", 16);
    check_accumulate(accumulate, dtype_dbias, op);
    const int64_t slabs = column_slabs(rows), needed = slabs * columns * 4;
    SUROGATE_REQUIRE(workspace_bytes >= needed, op,
                     "workspace needs " + std::to_string(needed) + " bytes, got " + std::to_string(workspace_bytes));
    const auto partials = static_cast<float*>(workspace);
    column_partials(dy, nullptr, nullptr, partials, rows, columns, dtype, op, stream);
    sum_partials(partials, slabs, columns, dbias, accumulate, dtype_dbias, op, stream);
}

}  // namespace surogate
