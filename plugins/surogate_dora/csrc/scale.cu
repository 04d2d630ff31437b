// dora_scale:     y[t, c] = m[c] / norm[c] * h[t, c] + bias[c]     of a band of columns; without m the factor is 1
// dora_scale_bwd: d_h[t, c] = m[c] / norm[c] * dy[t, c]; without m a copy
//                 d_m[c] (+)= sum over t of dy[t, c] * h[t, c] / norm[c]
//
//   h, y, dy, d_h  [rows, columns] of matrices with `stride` elements from row to row, fp32 or bf16, alike
//   norm           [columns] fp32
//   m, bias, d_m   [columns] fp32 or bf16, each its own; m and bias may be null. Only an fp32 d_m accumulates.
//   partials       [slabs, columns] fp32 workspace: sums over the rows of a slab
//
// In fp32, rounded once. The sum over rows has a fixed order: the 8 thread rows of a block take every eighth row of their
// slab, and are added in order; a second kernel adds the slabs in order. So d_m does not depend on timing.
//
// Pointers are aligned to their element; 16-byte accesses where a band begins at a multiple of 16 bytes and its rows are
// a multiple of 16 bytes apart, but for what is left of eight at its end. A block takes 256 columns, a thread eight.
// Bytes: h or dy and y or d_h once, and h in the backward pass: 0.8 and 1.2 GB for [8192, 24576] in bf16.
#include "scale.h"

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"

namespace surogate {
namespace {

constexpr const char* op = "dora_scale";
constexpr int lanes = 32;
constexpr int thread_rows = 8;
constexpr int block_columns = lanes * octet;
constexpr int64_t most_slabs = 128;

struct Vector {
    const void* content;  // null: none
    bool is_wide;

    __device__ __forceinline__ float operator[](int64_t i) const {
        return is_wide ? static_cast<const float*>(content)[i] : to_float(static_cast<const __nv_bfloat16*>(content)[i]);
    }
};

__device__ __forceinline__ void load_factors(Vector m, const float* norm, int64_t first, int64_t columns,
                                             float (&factors)[octet]) {
#pragma unroll
    for (int j = 0; j < octet; ++j) {
        const bool inside = m.content != nullptr && first + j < columns;
        factors[j] = inside ? m[first + j] / norm[first + j] : 1.0f;
    }
}

template <class T>
__global__ void __launch_bounds__(lanes* thread_rows)
    scale_kernel(const T* h, const float* norm, Vector m, Vector bias, T* y, int64_t rows, int64_t columns, int64_t stride,
                 bool aligned) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * block_columns + threadIdx.x * octet;
    if (first >= columns) {
        return;
    }
    const int64_t count = columns - first;
    const bool whole = aligned && count >= octet;
    float factors[octet], added[octet];
    load_factors(m, norm, first, columns, factors);
#pragma unroll
    for (int j = 0; j < octet; ++j) {
        added[j] = bias.content != nullptr && j < count ? bias[first + j] : 0.0f;
    }
    const int64_t step = static_cast<int64_t>(gridDim.y) * thread_rows;
    for (int64_t row = static_cast<int64_t>(blockIdx.y) * thread_rows + threadIdx.y; row < rows; row += step) {
        float x[octet];
        load_octet(h + row * stride + first, x, count, whole);
#pragma unroll
        for (int j = 0; j < octet; ++j) {
            x[j] = __fmul_rn(factors[j], x[j]);
            if (bias.content != nullptr) {
                x[j] = __fadd_rn(x[j], added[j]);
            }
        }
        store_octet(y + row * stride + first, x, count, whole);
    }
}

template <class T>
__global__ void __launch_bounds__(lanes* thread_rows)
    scale_bwd_kernel(const T* dy, const T* h, const float* norm, Vector m, T* d_h, float* partials, int64_t rows,
                     int64_t columns, int64_t stride, int64_t slab_rows, bool aligned) {
    __shared__ float sums[thread_rows][block_columns];
    const int64_t first = static_cast<int64_t>(blockIdx.x) * block_columns + threadIdx.x * octet;
    const int64_t count = columns - first;
    const bool whole = aligned && count >= octet;
    float factors[octet], sum[octet] = {};
    load_factors(m, norm, first, columns, factors);
    const int64_t begin = static_cast<int64_t>(blockIdx.y) * slab_rows;
    const int64_t end = begin + slab_rows < rows ? begin + slab_rows : rows;
    for (int64_t row = begin + threadIdx.y; row < end && count > 0; row += thread_rows) {
        float d[octet], x[octet];
        load_octet(dy + row * stride + first, d, count, whole);
        if (m.content != nullptr) {
            load_octet(h + row * stride + first, x, count, whole);
#pragma unroll
            for (int j = 0; j < octet; ++j) {
                sum[j] = fmaf(d[j], x[j], sum[j]);
                d[j] = __fmul_rn(factors[j], d[j]);
            }
        }
        store_octet(d_h + row * stride + first, d, count, whole);
    }
    if (m.content == nullptr) {
        return;
    }
#pragma unroll
    for (int j = 0; j < octet; ++j) {
        sums[threadIdx.y][threadIdx.x * octet + j] = sum[j];
    }
    __syncthreads();
    const int column = threadIdx.y * lanes + threadIdx.x;  // of the block's 256, as many as it has threads
    const int64_t own = static_cast<int64_t>(blockIdx.x) * block_columns + column;
    if (own < columns) {
        float total = 0.0f;
#pragma unroll
        for (int y = 0; y < thread_rows; ++y) {
            total += sums[y][column];
        }
        partials[blockIdx.y * columns + own] = total;
    }
}
static_assert(lanes * thread_rows == block_columns);

__global__ void __launch_bounds__(block_columns)
    sum_kernel(const float* partials, const float* norm, void* d_m, int64_t slabs, int64_t columns, bool is_wide,
               bool accumulates) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * block_columns + threadIdx.x;
    if (column >= columns) {
        return;
    }
    float total = 0.0f;
    for (int64_t slab = 0; slab < slabs; ++slab) {
        total += partials[slab * columns + column];
    }
    total /= norm[column];
    if (is_wide) {
        float* out = static_cast<float*>(d_m) + column;
        *out = accumulates ? *out + total : total;
    } else {
        static_cast<__nv_bfloat16*>(d_m)[column] = from_float<__nv_bfloat16>(total);
    }
}

template <class T>
bool in_octets(int64_t stride, const void* a, const void* b, const void* c) {
    return stride * sizeof(T) % 16 == 0 && is_aligned(a, 16) && is_aligned(b, 16) && is_aligned(c, 16);
}

template <class T>
void launch(const void* h, const void* norm, Vector m, Vector bias, void* y, int64_t rows, int64_t columns, int64_t stride,
            cudaStream_t stream) {
    check_pointer(h, op, "h", sizeof(T));
    check_pointer(y, op, "y", sizeof(T));
    const int64_t turns = ceil_div(rows, thread_rows);
    const dim3 grid(static_cast<unsigned>(to_int(ceil_div(columns, block_columns), op, "columns / 256")),
                    static_cast<unsigned>(turns < most_slabs ? turns : most_slabs));
    scale_kernel<T><<<grid, dim3(lanes, thread_rows), 0, stream>>>(
        static_cast<const T*>(h), static_cast<const float*>(norm), m, bias, static_cast<T*>(y), rows, columns, stride,
        in_octets<T>(stride, h, y, y));
    check_launch(op);
}

template <class T>
void launch_bwd(const void* dy, const void* h, const void* norm, Vector m, void* d_h, float* partials, int64_t rows,
                int64_t columns, int64_t stride, int64_t slabs, cudaStream_t stream) {
    check_pointer(dy, op, "dy", sizeof(T));
    check_pointer(h, op, "h", sizeof(T));
    check_pointer(d_h, op, "d_h", sizeof(T));
    const dim3 grid(static_cast<unsigned>(to_int(ceil_div(columns, block_columns), op, "columns / 256")),
                    static_cast<unsigned>(slabs));
    scale_bwd_kernel<T><<<grid, dim3(lanes, thread_rows), 0, stream>>>(
        static_cast<const T*>(dy), static_cast<const T*>(h), static_cast<const float*>(norm), m, static_cast<T*>(d_h),
        partials, rows, columns, stride, ceil_div(rows, slabs), in_octets<T>(stride, dy, h, d_h));
    check_launch(op);
}

void check_floats(int dtype, const char* argument) {
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op,
                     std::string(argument) + " must be fp32 or bf16, not " + name_of(dtype));
}

void check_sizes(int64_t rows, int64_t columns, int64_t stride) {
    check_positive(rows, op, "rows");
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(stride >= columns, op, "stride must be at least columns, got " + std::to_string(stride));
}

Vector vector_of(const void* content, int dtype, const char* argument) {
    check_floats(dtype, argument);
    SUROGATE_REQUIRE(is_aligned(content, dtype == FP32 ? 4 : 2), op, std::string(argument) + " must be aligned to its element");
    return {content, dtype == FP32};
}

}  // namespace

void dora_scale(const void* h, const void* norm, const void* m, const void* bias, void* y, int64_t rows, int64_t columns,
                int64_t stride, int dtype, int dtype_m, int dtype_bias, cudaStream_t stream) {
    check_sizes(rows, columns, stride);
    check_pointer(norm, op, "norm", 4);
    check_floats(dtype, "h");
    const Vector scaled = vector_of(m, dtype_m, "m"), added = vector_of(bias, dtype_bias, "bias");
    if (dtype == FP32) {
        launch<float>(h, norm, scaled, added, y, rows, columns, stride, stream);
    } else {
        launch<__nv_bfloat16>(h, norm, scaled, added, y, rows, columns, stride, stream);
    }
}

void dora_scale_bwd(const void* dy, const void* h, const void* norm, const void* m, void* d_h, void* d_m, void* partials,
                    int64_t rows, int64_t columns, int64_t stride, int64_t slabs, int dtype, int dtype_m, int dtype_d_m,
                    int accumulates, cudaStream_t stream) {
    check_sizes(rows, columns, stride);
    check_pointer(norm, op, "norm", 4);
    check_floats(dtype, "dy");
    check_floats(dtype_d_m, "d_m");
    SUROGATE_REQUIRE(slabs > 0 && slabs <= most_slabs, op, "slabs must be 1 to 128, got " + std::to_string(slabs));
    SUROGATE_REQUIRE(!accumulates || dtype_d_m == FP32, op, "only fp32 accumulates");
    const Vector scaled = vector_of(m, dtype_m, "m");
    if (m != nullptr) {
        check_pointer(d_m, op, "d_m", dtype_d_m == FP32 ? 4 : 2);
        check_pointer(partials, op, "partials", 4);
    }
    float* sums = static_cast<float*>(partials);
    if (dtype == FP32) {
        launch_bwd<float>(dy, h, norm, scaled, d_h, sums, rows, columns, stride, slabs, stream);
    } else {
        launch_bwd<__nv_bfloat16>(dy, h, norm, scaled, d_h, sums, rows, columns, stride, slabs, stream);
    }
    if (m != nullptr) {
        sum_kernel<<<to_int(ceil_div(columns, block_columns), op, "columns / 256"), block_columns, 0, stream>>>(
            sums, static_cast<const float*>(norm), d_m, slabs, columns, dtype_d_m == FP32, accumulates != 0);
        check_launch(op);
    }
}

}  // namespace surogate
