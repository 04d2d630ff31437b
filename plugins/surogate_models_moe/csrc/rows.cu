// Rows of tokens on their way to experts and back. R = T k rows; place [R] int32 is the row of each slot t k + j, order [R]
// the slot of each row:
//
//   gather_rows          y [R,D]: row place[t k + j] = x[t],  x [T,D]
//   sum_rows             out [T,D] = sum over j of y[place[t k + j]], fp32 in the order of j
//   weighted_swiglu      out [R,F] = silu(gate) * up * w,  gate_up [R,2F] = [gate; up], w = weights.flat[order[row]]
//   weighted_swiglu_bwd  d_gate_up [R,2F] = that of swiglu with dy * w
//                        d_weights.flat[order[row]] = sum over F of dy * silu(gate) * up
//
// weights, d_weights [T,k] fp32; all else bf16, row-major, contiguous and aligned to 16 bytes; D and F are multiples of 8.
// Arithmetic is fp32, and each output is rounded once. d_gate_up may be the buffer of gate_up. A thread has 8 elements of a
// token or a row, in weighted_swiglu_bwd a warp has a row.
//
// Bytes: gather_rows and sum_rows 2 D (R + T), so x is read once and not k times; weighted_swiglu 6 F R, backward 10 F R.
// Qwen3-30B-A3B with 16,384 tokens (R 131,072, D 2,048, F 768) at 4.8 TB/s: 126, 126, 126 and 210 us.
#include <cuda_runtime.h>

#include <string>

#include "rows.h"
#include "surogate/check.h"
#include "surogate/octet.cuh"
#include "surogate/reduce.cuh"
#include "surogate/swiglu.cuh"

namespace surogate {
namespace {

using T = __nv_bfloat16;
constexpr int threads = 256;
constexpr int ahead = 8;  // rows of a token that a thread loads before it adds the first

__global__ void __launch_bounds__(threads)
    gather_rows_kernel(const T* x, const int32_t* place, T* y, unsigned octets, unsigned of_row, int k) {
    const unsigned i = blockIdx.x * threads + threadIdx.x;
    if (i >= octets) {
        return;
    }
    const unsigned token = i / of_row;
    const int64_t column = static_cast<int64_t>(i % of_row) * octet;
    const int64_t width = static_cast<int64_t>(of_row) * octet;
    const auto v = Packed<T>::load(x + static_cast<int64_t>(i) * octet);
    const int32_t* rows = place + static_cast<int64_t>(token) * k;
#pragma unroll 8
    for (int j = 0; j < k; ++j) {
        v.store(y + rows[j] * width + column);
    }
}

__global__ void __launch_bounds__(threads)
    sum_rows_kernel(const T* y, const int32_t* place, T* out, unsigned octets, unsigned of_row, int k) {
    const unsigned i = blockIdx.x * threads + threadIdx.x;
    if (i >= octets) {
        return;
    }
    const unsigned token = i / of_row;
    const int64_t column = static_cast<int64_t>(i % of_row) * octet;
    const int64_t width = static_cast<int64_t>(of_row) * octet;
    const int32_t* rows = place + static_cast<int64_t>(token) * k;
    float sum[octet] = {};
    for (int first = 0; first < k; first += ahead) {
        Packed<T> loaded[ahead];
#pragma unroll
        for (int j = 0; j < ahead; ++j) {
            if (first + j < k) {
                loaded[j] = Packed<T>::load(y + rows[first + j] * width + column);
            }
        }
#pragma unroll
        for (int j = 0; j < ahead; ++j) {
            if (first + j < k) {
                float x[octet];
                loaded[j].to_float(x);
#pragma unroll
                for (int c = 0; c < octet; ++c) {
                    sum[c] += x[c];
                }
            }
        }
    }
    store_octet(out + static_cast<int64_t>(i) * octet, sum);
}

__global__ void __launch_bounds__(threads)
    weighted_swiglu_kernel(const T* gate_up, const float* weights, const int32_t* order, T* out, unsigned octets,
                           unsigned of_row) {
    const unsigned i = blockIdx.x * threads + threadIdx.x;
    if (i >= octets) {
        return;
    }
    const unsigned row = i / of_row;
    const int64_t width = static_cast<int64_t>(of_row) * octet;
    const T* in = gate_up + row * 2 * width + static_cast<int64_t>(i % of_row) * octet;
    float gate[octet], up[octet];
    load_octet(in, gate);
    load_octet(in + width, up);
    const float weight = weights[order[row]];
#pragma unroll
    for (int c = 0; c < octet; ++c) {
        up[c] = swiglu<true>(gate[c], up[c]) * weight;
    }
    store_octet(out + static_cast<int64_t>(i) * octet, up);
}

__global__ void __launch_bounds__(threads)
    weighted_swiglu_bwd_kernel(const T* dy, const T* gate_up, const float* weights, const int32_t* order, T* d_gate_up,
                               float* d_weights, int64_t rows, int width) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * (threads / 32) + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int slot = order[row];
    const float weight = weights[slot];
    float total = 0.0f;
    for (int column = lane * octet; column < width; column += 32 * octet) {
        const T* in = gate_up + row * 2 * width + column;
        float d[octet], gate[octet], up[octet];
        load_octet(dy + row * width + column, d);
        load_octet(in, gate);
        load_octet(in + width, up);
#pragma unroll
        for (int c = 0; c < octet; ++c) {
            const auto gradient = SwigluGradient::of<true>(d[c] * weight, gate[c], up[c]);
            total += d[c] * gradient.output;
            gate[c] = gradient.gate;
            up[c] = gradient.up;
        }
        T* to = d_gate_up + row * 2 * width + column;
        store_octet(to, gate);
        store_octet(to + width, up);
    }
    total = warp_sum(total);
    if (lane == 0) {
        d_weights[slot] = total;
    }
}

struct Sizes {
    unsigned octets, of_row, blocks;

    // Of a tensor [rows,width] in which a thread has eight elements.
    Sizes(int64_t rows, int64_t width, const char* op) {
        check_positive(rows, op, "rows");
        SUROGATE_REQUIRE(width > 0 && width % octet == 0, op,
                         "the width must be a multiple of 8, got " + std::to_string(width));
        octets = static_cast<unsigned>(to_int(rows * (width / octet), op, "elements / 8"));
        of_row = static_cast<unsigned>(width / octet);
        blocks = (octets + threads - 1) / threads;
    }
};

const T* read(const void* pointer, const char* op, const char* name) {
    check_pointer(pointer, op, name, 16);
    return static_cast<const T*>(pointer);
}

T* written(void* pointer, const char* op, const char* name) {
    check_pointer(pointer, op, name, 16);
    return static_cast<T*>(pointer);
}

template <class Word>
Word* words(Word* pointer, const char* op, const char* name) {
    check_pointer(pointer, op, name, 4);
    return pointer;
}

int checked_k(int64_t k, const char* op) {
    check_positive(k, op, "k");
    return to_int(k, op, "k");
}

}  // namespace

void gather_rows(const void* x, const void* place, void* y, int64_t tokens, int64_t k, int64_t width, cudaStream_t stream) {
    constexpr const char* op = "gather_rows";
    const Sizes sizes(tokens, width, op);
    const T* in = read(x, op, "x");
    T* out = written(y, op, "y");
    const auto* rows = words(static_cast<const int32_t*>(place), op, "place");
    const int of_token = checked_k(k, op);
    gather_rows_kernel<<<sizes.blocks, threads, 0, stream>>>(in, rows, out, sizes.octets, sizes.of_row, of_token);
    check_launch(op);
}

void sum_rows(const void* y, const void* place, void* out, int64_t tokens, int64_t k, int64_t width, cudaStream_t stream) {
    constexpr const char* op = "sum_rows";
    const Sizes sizes(tokens, width, op);
    const T* in = read(y, op, "y");
    T* sums = written(out, op, "out");
    const auto* rows = words(static_cast<const int32_t*>(place), op, "place");
    const int of_token = checked_k(k, op);
    sum_rows_kernel<<<sizes.blocks, threads, 0, stream>>>(in, rows, sums, sizes.octets, sizes.of_row, of_token);
    check_launch(op);
}

void weighted_swiglu(const void* gate_up, const void* weights, const void* order, void* out, int64_t rows, int64_t width,
                     cudaStream_t stream) {
    constexpr const char* op = "weighted_swiglu";
    const Sizes sizes(rows, width, op);
    const T* in = read(gate_up, op, "gate_up");
    T* products = written(out, op, "out");
    const auto* factors = words(static_cast<const float*>(weights), op, "weights");
    const auto* slots = words(static_cast<const int32_t*>(order), op, "order");
    weighted_swiglu_kernel<<<sizes.blocks, threads, 0, stream>>>(in, factors, slots, products, sizes.octets, sizes.of_row);
    check_launch(op);
}

void weighted_swiglu_bwd(const void* dy, const void* gate_up, const void* weights, const void* order, void* d_gate_up,
                         void* d_weights, int64_t rows, int64_t width, cudaStream_t stream) {
    constexpr const char* op = "weighted_swiglu_bwd";
    const Sizes sizes(rows, width, op);
    const T *gradient = read(dy, op, "dy"), *in = read(gate_up, op, "gate_up");
    T* out = written(d_gate_up, op, "d_gate_up");
    const auto* factors = words(static_cast<const float*>(weights), op, "weights");
    const auto* slots = words(static_cast<const int32_t*>(order), op, "order");
    auto* sums = words(static_cast<float*>(d_weights), op, "d_weights");
    const int blocks = to_int(ceil_div(rows, threads / 32), op, "rows / 8");
    weighted_swiglu_bwd_kernel<<<blocks, threads, 0, stream>>>(gradient, in, factors, slots, out, sums, rows,
                                                               static_cast<int>(width));
    check_launch(op);
}

}  // namespace surogate
