// gate_up [T, 2F], columns are the halves [gate; up]; surogate/geglu.cuh has the formulas:
//   geglu      out [T, F] = gelu(gate) * up
//   geglu_bwd  dgate_up [T, 2F], the gradients of gate and up
//
// All tensors are row-major and have one dtype, fp32 or bf16. Arithmetic is fp32, with accurate tanhf; each output is
// written and rounded once. A thread reads its elements before it writes, so dgate_up may be the same buffer as gate_up.
// Pointers are aligned to their element. Accesses are 16 bytes wide if all pointers are aligned to 16 bytes and F is a
// multiple of 16 / element size. Grid: a block processes a segment of one row, a thread one vector of it.
//
// Bytes moved per element of F in bf16: 4 read + 2 written; backward 6 + 4.

#include <surogate/dispatch.cuh>
#include <surogate/geglu.cuh>

#include "gemma.h"

namespace surogate {
namespace {

constexpr int threads = 256;

template <class T, int N>
__global__ void __launch_bounds__(threads) geglu_kernel(const T* gate_up, T* out, int64_t width) {
    using V = Vec<T, N>;
    const int64_t row = blockIdx.x;
    const int64_t column = (static_cast<int64_t>(blockIdx.y) * threads + threadIdx.x) * N;
    if (column >= width) {
        return;
    }
    const T* in = gate_up + row * 2 * width + column;
    float gate[N], up[N];
    V::load(in).to_float(gate);
    V::load(in + width).to_float(up);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        up[i] = geglu(gate[i], up[i]);
    }
    V::from_float(up).store(out + row * width + column);
}

template <class T, int N>
__global__ void __launch_bounds__(threads)
    geglu_bwd_kernel(const T* dout, const T* gate_up, T* dgate_up, int64_t width) {
    using V = Vec<T, N>;
    const int64_t row = blockIdx.x;
    const int64_t column = (static_cast<int64_t>(blockIdx.y) * threads + threadIdx.x) * N;
    if (column >= width) {
        return;
    }
    const int64_t at = row * 2 * width + column;
    float d[N], gate[N], up[N];
    V::load(dout + row * width + column).to_float(d);
    V::load(gate_up + at).to_float(gate);
    V::load(gate_up + at + width).to_float(up);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const auto gradient = GegluGradient::of(d[i], gate[i], up[i]);
        gate[i] = gradient.gate;
        up[i] = gradient.up;
    }
    V::from_float(gate).store(dgate_up + at);
    V::from_float(up).store(dgate_up + at + width);
}

template <class T>
dim3 grid_of(int64_t rows, int64_t width, bool wide, const char* op) {
    const int64_t tiles = ceil_div(wide ? width / Vec<T>::size : width, threads);
    SUROGATE_REQUIRE(tiles <= 65535, op, "width is too large, got " + std::to_string(width));
    return dim3(static_cast<unsigned>(to_int(rows, op, "rows")), static_cast<unsigned>(tiles));
}

}  // namespace

void geglu(const void* gate_up, void* out, int64_t rows, int64_t width, int dtype, cudaStream_t stream) {
    constexpr const char* op = "geglu";
    with_float_type(dtype, op, "gate_up", [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int n = vector_width<T>;
        check_positive(rows, op, "rows");
        check_positive(width, op, "width");
        check_pointer(gate_up, op, "gate_up", sizeof(T));
        check_pointer(out, op, "out", sizeof(T));
        const bool wide = width % n == 0 && all_aligned({gate_up, out});
        const auto kernel = wide ? geglu_kernel<T, n> : geglu_kernel<T, 1>;
        kernel<<<grid_of<T>(rows, width, wide, op), threads, 0, stream>>>(static_cast<const T*>(gate_up),
                                                                          static_cast<T*>(out), width);
        check_launch(op);
    });
}

void geglu_bwd(const void* dout, const void* gate_up, void* dgate_up, int64_t rows, int64_t width, int dtype,
               cudaStream_t stream) {
    constexpr const char* op = "geglu_bwd";
    with_float_type(dtype, op, "gate_up", [&](auto type) {
        using T = typename decltype(type)::type;
        constexpr int n = vector_width<T>;
        check_positive(rows, op, "rows");
        check_positive(width, op, "width");
        check_pointer(dout, op, "dout", sizeof(T));
        check_pointer(gate_up, op, "gate_up", sizeof(T));
        check_pointer(dgate_up, op, "dgate_up", sizeof(T));
        const bool wide = width % n == 0 && all_aligned({dout, gate_up, dgate_up});
        const auto kernel = wide ? geglu_bwd_kernel<T, n> : geglu_bwd_kernel<T, 1>;
        kernel<<<grid_of<T>(rows, width, wide, op), threads, 0, stream>>>(
            static_cast<const T*>(dout), static_cast<const T*>(gate_up), static_cast<T*>(dgate_up), width);
        check_launch(op);
    });
}

}  // namespace surogate
