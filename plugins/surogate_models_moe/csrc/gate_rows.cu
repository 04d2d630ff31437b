// The gate of a shared expert, of which each row has one: with s = sigmoid(gate),
//
//   gate_rows      y [R,D]  = x s,   x [R,D], gate [R,1]
//   gate_rows_bwd  dx [R,D] = dy s,  d_gate [R,1] = s (1 - s) sum over D of dy x
//
// All bf16, row-major, contiguous; rows are aligned to 16 bytes, gates to 2; D is a multiple of 8. y may be x, and dx may be dy.
// Arithmetic is fp32, and each output is rounded once. Forward a thread has 8 elements, backward a warp has a row, whose lanes
// add in a fixed order.
//
// Bytes: 4 D R forward, 6 D R backward. 8,192 rows of 2,048 (35B-A3B) at 4.8 TB/s: 14 and 21 us.
#include <cuda_runtime.h>

#include <string>

#include "rows.h"
#include "surogate/check.h"
#include "surogate/octet.cuh"
#include "surogate/reduce.cuh"
#include "surogate/sigmoid.cuh"

namespace surogate {
namespace {

using T = __nv_bfloat16;
constexpr int threads = 256;
constexpr int warps = threads / 32;

__global__ void __launch_bounds__(threads)
    gate_rows_kernel(const T* x, const T* gate, T* y, unsigned octets, unsigned of_row) {
    const unsigned i = blockIdx.x * threads + threadIdx.x;
    if (i >= octets) {
        return;
    }
    const float share = sigmoid<false>(to_float(gate[i / of_row])).of;
    float a[octet];
    load_octet(x + static_cast<int64_t>(i) * octet, a);
#pragma unroll
    for (int c = 0; c < octet; ++c) {
        a[c] *= share;
    }
    store_octet(y + static_cast<int64_t>(i) * octet, a);
}

__global__ void __launch_bounds__(threads)
    gate_rows_bwd_kernel(const T* dy, const T* x, const T* gate, T* dx, T* d_gate, int64_t rows, int width) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    const Sigmoid share = sigmoid<false>(to_float(gate[row]));
    float total = 0.0f;
    for (int column = lane * octet; column < width; column += 32 * octet) {
        const int64_t at = row * width + column;
        float d[octet], a[octet];
        load_octet(dy + at, d);
        load_octet(x + at, a);
#pragma unroll
        for (int c = 0; c < octet; ++c) {
            total = fmaf(d[c], a[c], total);
            d[c] *= share.of;
        }
        store_octet(dx + at, d);
    }
    total = warp_sum(total);
    if (lane == 0) {
        d_gate[row] = from_float<T>(share.of * share.complement * total);
    }
}

void check_rows(int64_t rows, int64_t width, const char* op) {
    check_positive(rows, op, "rows");
    SUROGATE_REQUIRE(width > 0 && width % octet == 0, op, "the width must be a multiple of 8, got " + std::to_string(width));
}

}  // namespace

void gate_rows(const void* x, const void* gate, void* y, int64_t rows, int64_t width, cudaStream_t stream) {
    constexpr const char* op = "gate_rows";
    check_rows(rows, width, op);
    check_pointer(x, op, "x", 16);
    check_pointer(gate, op, "gate", 2);
    check_pointer(y, op, "y", 16);
    const auto octets = static_cast<unsigned>(to_int(rows * (width / octet), op, "elements / 8"));
    gate_rows_kernel<<<(octets + threads - 1) / threads, threads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(gate), static_cast<T*>(y), octets,
        static_cast<unsigned>(width / octet));
    check_launch(op);
}

void gate_rows_bwd(const void* dy, const void* x, const void* gate, void* dx, void* d_gate, int64_t rows, int64_t width,
                   cudaStream_t stream) {
    constexpr const char* op = "gate_rows_bwd";
    check_rows(rows, width, op);
    check_pointer(dy, op, "dy", 16);
    check_pointer(x, op, "x", 16);
    check_pointer(gate, op, "gate", 2);
    check_pointer(dx, op, "dx", 16);
    check_pointer(d_gate, op, "d_gate", 2);
    gate_rows_bwd_kernel<<<to_int(ceil_div(rows, static_cast<int64_t>(warps)), op, "rows / 8"), threads, 0, stream>>>(
        static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(gate), static_cast<T*>(dx),
        static_cast<T*>(d_gate), rows, to_int(width, op, "width"));
    check_launch(op);
}

}  // namespace surogate
