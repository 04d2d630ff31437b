// gate_up [T, 2F], columns are the halves [gate; up]:
//   swiglu      out [T, F] = silu(gate) * up,  silu(g) = g * sigmoid(g)
//   swiglu_bwd  dgate_up [T, 2F]:  dgate = dout * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))),
//                                  dup   = dout * silu(gate)
//               and, unless it is null, out with the bits of swiglu
//
// All tensors are row-major and have one dtype, fp32 or bf16. Arithmetic is fp32; each output is written and rounded
// once. A thread reads its elements before it writes, so in the backward pass dgate_up may be the same buffer as gate_up,
// and out the same as dout. Pointers are aligned to their element. Accesses are 16 bytes wide if all pointers are aligned
// to 16 bytes and F is a multiple of 16 / element size. Grid: a block processes a segment of one row, a thread one vector
// of it.
//
// Bytes moved per element of F in bf16: 4 read + 2 written; backward 6 + 4, with out 6 + 6. Expected: 85-90 % of
// bandwidth. In bf16 the kernels use the fast hardware exponential and division. Their error is 2 ulp of fp32 for
// moderate gates and at worst 2^-17 relative, compared with 2^-9 of the rounding. IEEE division alone would take a third
// of the time available at full bandwidth.
#include <surogate/dispatch.cuh>
#include <surogate/swiglu.cuh>

#include "elementwise.h"

namespace surogate {
namespace {

constexpr int kMaxThreads = 256;

template <class T>
constexpr bool is_fast = sizeof(T) == 2;

template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads) swiglu_kernel(const T* gate_up, T* out, int64_t width) {
    using V = Vec<T, N>;
    const int64_t row = blockIdx.x;
    const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N;
    if (column >= width) {
        return;
    }
    const T* in = gate_up + row * 2 * width + column;
    float gate[N], up[N];
    V::load(in).to_float(gate);
    V::load(in + width).to_float(up);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        up[i] = swiglu<is_fast<T>>(gate[i], up[i]);
    }
    V::from_float(up).store(out + row * width + column);
}

template <class T, int N, bool Recompute>
__global__ void __launch_bounds__(kMaxThreads)
    swiglu_bwd_kernel(const T* dout, const T* gate_up, T* dgate_up, T* out, int64_t width) {
    using V = Vec<T, N>;
    const int64_t row = blockIdx.x;
    const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * N;
    if (column >= width) {
        return;
    }
    const T* in = gate_up + row * 2 * width + column;
    float d[N], gate[N], up[N];
    V::load(dout + row * width + column).to_float(d);
    V::load(in).to_float(gate);
    V::load(in + width).to_float(up);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const auto gradient = SwigluGradient::of<is_fast<T>>(d[i], gate[i], up[i]);
        d[i] = gradient.output;
        gate[i] = gradient.gate;
        up[i] = gradient.up;
    }
    if constexpr (Recompute) {
        V::from_float(d).store(out + row * width + column);
    }
    T* to = dgate_up + row * 2 * width + column;
    V::from_float(gate).store(to);
    V::from_float(up).store(to + width);
}

struct Launch {
    dim3 grid;
    unsigned threads;
};

// Minimizes the number of blocks per row, then the number of threads per block: 384 vectors take two blocks of 192.
Launch launch_for(int64_t rows, int64_t vectors, const char* op) {
    const int64_t tiles = ceil_div(vectors, kMaxThreads);
    SUROGATE_REQUIRE(tiles <= 65535, op, "width is too large, got " + std::to_string(vectors) + " vectors");
    const int64_t threads = ceil_div(ceil_div(vectors, tiles), 32) * 32;
    return {dim3(to_int(rows, op, "rows"), static_cast<unsigned>(tiles)), static_cast<unsigned>(threads)};
}

void check(const char* op, const void* gate_up, const char* name, const void* half, const char* half_name, int64_t rows,
           int64_t width, int dtype) {
    check_positive(rows, op, "rows");
    check_positive(width, op, "width");
    check_pointer(gate_up, op, name, bytes_of(dtype));
    check_pointer(half, op, half_name, bytes_of(dtype));
}

}  // namespace

void swiglu(const void* gate_up, void* out, int64_t rows, int64_t width, int dtype, cudaStream_t stream) {
    with_float_type(dtype, "swiglu", "gate_up", [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int n = vector_width<T>;
        check("swiglu", gate_up, "gate_up", out, "out", rows, width, dtype);
        const bool wide = width % n == 0 && all_aligned({gate_up, out});
        const Launch at = launch_for(rows, wide ? width / n : width, "swiglu");
        const auto kernel = wide ? swiglu_kernel<T, n> : swiglu_kernel<T, 1>;
        kernel<<<at.grid, at.threads, 0, stream>>>(static_cast<const T*>(gate_up), static_cast<T*>(out), width);
    });
    check_launch("swiglu");
}

void swiglu_bwd(const void* dout, const void* gate_up, void* dgate_up, void* out, int64_t rows, int64_t width, int dtype,
                cudaStream_t stream) {
    with_float_type(dtype, "swiglu_bwd", "gate_up", [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int n = vector_width<T>;
        check("swiglu_bwd", gate_up, "gate_up", dout, "dout", rows, width, dtype);
        check_pointer(dgate_up, "swiglu_bwd", "dgate_up", bytes_of(dtype));
        if (out != nullptr) {
            check_pointer(out, "swiglu_bwd", "out", bytes_of(dtype));
        }
        const bool wide = width % n == 0 && all_aligned({dout, gate_up, dgate_up, out});
        const Launch at = launch_for(rows, wide ? width / n : width, "swiglu_bwd");
        const auto kernel = out == nullptr ? (wide ? swiglu_bwd_kernel<T, n, false> : swiglu_bwd_kernel<T, 1, false>)
                                           : (wide ? swiglu_bwd_kernel<T, n, true> : swiglu_bwd_kernel<T, 1, true>);
        kernel<<<at.grid, at.threads, 0, stream>>>(static_cast<const T*>(dout), static_cast<const T*>(gate_up),
                                                   static_cast<T*>(dgate_up), static_cast<T*>(out), width);
    });
    check_launch("swiglu_bwd");
}

}  // namespace surogate
