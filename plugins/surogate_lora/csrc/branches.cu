// lora_add    y [T, N] = base [T, N], with scale * branch [T, n] added to n of its columns for every branch
// lora_slice  out [T, n] = scale * x[:, column : column + n], x [T, N]
//
// All row-major, each fp32 or bf16; y has the dtype of base. In fp32, as the reference: the product is rounded, then the
// sum (no fused multiply-add), then the result to its dtype, each to nearest even. So they have the bits of
// `surogate_lora.reference`. Columns of no branch are base's own.
//
//   table  [branches] entries of 4 int64 words in device memory, see Branch: their columns lie within [0, N), ascending
//          and apart from each other
//   y      may be base itself: a thread reads its elements before it writes them. Nothing accumulates.
//
// Pointers are aligned to their element. 16-byte accesses for each buffer by itself: base and y where N, a branch where
// its column and n, x where N and column, out where n are multiples of 8, and it begins at a multiple of 16 bytes; else
// and behind the last eight columns one element at a time. A block takes a stretch of one row, a thread eight columns of
// it; a branch that does not meet these costs a thread a look at its entry.
//
// Bytes: lora_add reads base and the branches and writes y, 6 an element where branches cover all columns and
// everything is bf16, 12 in fp32; lora_slice 4 and 8 an element of out. Four operations an element: memory is the
// limit. The floor at 4.8 TB/s for T = 8192, bf16: 42 us for q, k, v of 4,096 columns together, 63 us for gate and up
// of 6,144; slices of the same two thirds of it. 85 to 90 % of the bandwidth expected.
#include "branches.h"

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"

namespace surogate {
namespace {

constexpr int max_threads = 256;

struct Branch {
    const void* data;
    int64_t column;
    int64_t width;
    int64_t dtype;
};
static_assert(sizeof(Branch) == 4 * sizeof(int64_t));

__device__ __forceinline__ float add_scaled(float sum, float scale, float x) {
    return __fadd_rn(sum, __fmul_rn(scale, x));
}

// Adds what a branch has of eight columns; `first` is the branch's column for sum[0], perhaps outside of it.
template <class T>
__device__ __forceinline__ void add_branch(const T* row, int64_t first, int64_t width, float scale, bool aligned,
                                           float (&sum)[octet]) {
    if (aligned) {
        float x[octet];
        load_octet(row + first, x);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            sum[i] = add_scaled(sum[i], scale, x[i]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        if (first + i >= 0 && first + i < width) {
            sum[i] = add_scaled(sum[i], scale, to_float(row[first + i]));
        }
    }
}

template <class T>
__global__ void __launch_bounds__(max_threads)
    lora_add_kernel(const T* base, const Branch* table, T* y, int64_t width, int64_t branches, float scale,
                    bool aligned) {
    const int64_t row = blockIdx.x;
    const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * octet;
    if (column >= width) {
        return;
    }
    const int64_t count = width - column;
    const int64_t at = row * width + column;
    float sum[octet];
    load_octet(base + at, sum, count, aligned);
    for (int64_t i = 0; i < branches; ++i) {
        const Branch branch = table[i];
        const int64_t first = column - branch.column;
        if (first <= -octet || first >= branch.width) {
            continue;
        }
        // Where column and width are multiples of eight, the eight columns are all in the branch.
        const bool vectors =
            (branch.column | branch.width) % octet == 0 && reinterpret_cast<uintptr_t>(branch.data) % 16 == 0;
        if (branch.dtype == BF16) {
            add_branch(static_cast<const __nv_bfloat16*>(branch.data) + row * branch.width, first, branch.width, scale,
                       vectors, sum);
        } else {
            add_branch(static_cast<const float*>(branch.data) + row * branch.width, first, branch.width, scale, vectors,
                       sum);
        }
    }
    store_octet(y + at, sum, count, aligned);
}

template <class From, class To>
__global__ void __launch_bounds__(max_threads)
    lora_slice_kernel(const From* x, To* out, int64_t x_width, int64_t column, int64_t width, float scale,
                      bool x_aligned, bool out_aligned) {
    const int64_t row = blockIdx.x;
    const int64_t first = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * octet;
    if (first >= width) {
        return;
    }
    const int64_t count = width - first;
    float taken[octet];
    load_octet(x + row * x_width + column + first, taken, count, x_aligned && count >= octet);
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        taken[i] = __fmul_rn(scale, taken[i]);
    }
    store_octet(out + row * width + first, taken, count, out_aligned);
}

struct Launch {
    dim3 grid;
    unsigned threads;
};

// As few blocks a row as hold it, then as few threads a block: 384 octets become two blocks of 192.
Launch launch_for(int64_t rows, int64_t width, const char* op) {
    const int64_t octets = ceil_div(width, octet);
    const int64_t tiles = ceil_div(octets, max_threads);
    SUROGATE_REQUIRE(tiles <= 65535, op, "width is too large, got " + std::to_string(width));
    const int64_t threads = ceil_div(ceil_div(octets, tiles), 32) * 32;
    return {dim3(to_int(rows, op, "rows"), static_cast<unsigned>(tiles)), static_cast<unsigned>(threads)};
}

template <class T>
struct Type {
    using type = T;
};

// function(Type<float>{}) or function(Type<__nv_bfloat16>{}).
template <class Function>
void with_float_type(int dtype, const char* op, const char* argument, Function&& function) {
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op,
                     std::string(argument) + " must be fp32 or bf16, not " + name_of(dtype));
    if (dtype == FP32) {
        function(Type<float>{});
    } else {
        function(Type<__nv_bfloat16>{});
    }
}

}  // namespace

void lora_add(const void* base, const void* table, void* y, int64_t rows, int64_t width, int64_t branches,
              double scale, int dtype, cudaStream_t stream) {
    constexpr const char* op = "lora_add";
    check_positive(rows, op, "rows");
    check_positive(width, op, "width");
    check_positive(branches, op, "branches");
    check_pointer(table, op, "table", 8);
    with_float_type(dtype, op, "base", [&](auto type) {
        using T = typename decltype(type)::type;
        check_pointer(base, op, "base", sizeof(T));
        check_pointer(y, op, "y", sizeof(T));
        const bool aligned = width % octet == 0 && is_aligned(base, 16) && is_aligned(y, 16);
        const Launch at = launch_for(rows, width, op);
        lora_add_kernel<<<at.grid, at.threads, 0, stream>>>(static_cast<const T*>(base),
                                                            static_cast<const Branch*>(table), static_cast<T*>(y),
                                                            width, branches, static_cast<float>(scale), aligned);
    });
    check_launch(op);
}

void lora_slice(const void* x, void* out, int64_t rows, int64_t x_width, int64_t column, int64_t width, double scale,
                int dtype_x, int dtype_out, cudaStream_t stream) {
    constexpr const char* op = "lora_slice";
    check_positive(rows, op, "rows");
    check_positive(width, op, "width");
    SUROGATE_REQUIRE(column >= 0 && column + width <= x_width, op,
                     "columns " + std::to_string(column) + " to " + std::to_string(column + width) +
                         " are not all in the " + std::to_string(x_width) + " of x");
    with_float_type(dtype_x, op, "x", [&](auto from) {
        with_float_type(dtype_out, op, "out", [&](auto to) {
            using From = typename decltype(from)::type;
            using To = typename decltype(to)::type;
            check_pointer(x, op, "x", sizeof(From));
            check_pointer(out, op, "out", sizeof(To));
            const bool x_aligned = (x_width | column) % octet == 0 && is_aligned(x, 16);
            const bool out_aligned = width % octet == 0 && is_aligned(out, 16);
            const Launch at = launch_for(rows, width, op);
            lora_slice_kernel<<<at.grid, at.threads, 0, stream>>>(static_cast<const From*>(x), static_cast<To*>(out),
                                                                  x_width, column, width, static_cast<float>(scale),
                                                                  x_aligned, out_aligned);
        });
    });
    check_launch(op);
}

}  // namespace surogate
