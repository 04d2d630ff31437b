// out[i] (+)= a[i] + b[i]     add:  a and b have one dtype, fp32 or bf16; the sum is rounded to it, then cast to out's
// y[i]   (+)= x[i]            cast: x and y each fp32 or bf16; rounds to nearest even
// out[i]   =  value           fill: fp32 or bf16
//
// Contiguous arrays of `size` elements, aligned to their element. With `accumulate` the output is accumulated into (+=)
// and must be fp32. Outputs must not overlap inputs.
//
// Grid: if all pointers are aligned to 16 bytes, a thread processes 16 bytes of the widest operand, and the threads
// after the last whole vector process one remaining element each. Bytes moved: every operand once, accumulated outputs
// twice. Expected: 85-90 % of bandwidth for arrays of several MiB.
#include "elementwise.h"

#include <surogate/dispatch.cuh>

#include <type_traits>

namespace surogate {
namespace {

constexpr int kThreads = 256;

// A vector width as a type. for_my_elements calls body(first element, Width<N>) or body(element, Width<1>), so that
// each element is processed once.
template <int N>
struct Width {
    static constexpr int value = N;
};

template <int N, class Body>
__device__ __forceinline__ void for_my_elements(int64_t size, Body&& body) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t vectors = size / N;
    if (index < vectors) {
        body(index * N, Width<N>{});
    } else if (vectors * N + (index - vectors) < size) {
        body(vectors * N + (index - vectors), Width<1>{});
    }
}

template <int N>
unsigned blocks_for(int64_t size, const char* op) {
    return static_cast<unsigned>(to_int(ceil_div(size / N + size % N, kThreads), op, "size / threads"));
}

template <int N, class T>
__device__ __forceinline__ void store_or_add(T* out, float (&values)[N], bool accumulate) {
    using V = Vec<T, N>;
    if (accumulate) {
        float before[N];
        V::load(out).to_float(before);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            values[i] += before[i];
        }
    }
    V::from_float(values).store(out);
}

template <class T, class Out, int N>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const T* a, const T* b, Out* out, int64_t size, bool accumulate) {
    for_my_elements<N>(size, [&](int64_t i, auto width) {
        constexpr int n = decltype(width)::value;
        float x[n], y[n];
        Vec<T, n>::load(a + i).to_float(x);
        Vec<T, n>::load(b + i).to_float(y);
#pragma unroll
        for (int j = 0; j < n; ++j) {
            x[j] = to_float(from_float<T>(x[j] + y[j]));
        }
        store_or_add<n>(out + i, x, accumulate);
    });
}

template <class From, class To, int N>
__global__ void __launch_bounds__(kThreads) cast_kernel(const From* x, To* y, int64_t size, bool accumulate) {
    for_my_elements<N>(size, [&](int64_t i, auto width) {
        constexpr int n = decltype(width)::value;
        const auto in = Vec<From, n>::load(x + i);
        if constexpr (std::is_same_v<From, To>) {
            if (!accumulate) {
                in.store(y + i);  // keeps the payload of a NaN
                return;
            }
        }
        float values[n];
        in.to_float(values);
        store_or_add<n>(y + i, values, accumulate);
    });
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) fill_kernel(T* out, int64_t size, float value) {
    for_my_elements<N>(size, [&](int64_t i, auto width) {
        constexpr int n = decltype(width)::value;
        float values[n];
#pragma unroll
        for (int j = 0; j < n; ++j) {
            values[j] = value;
        }
        Vec<T, n>::from_float(values).store(out + i);
    });
}

}  // namespace

void add(const void* a, const void* b, void* out, int64_t size, bool accumulate, int dtype, int dtype_out,
         cudaStream_t stream) {
    check_positive(size, "add", "size");
    check_pointer(a, "add", "a", bytes_of(dtype));
    check_pointer(b, "add", "b", bytes_of(dtype));
    check_pointer(out, "add", "out", bytes_of(dtype_out));
    check_accumulate(accumulate, dtype_out, "add");
    with_float_type(dtype, "add", "a", [&](auto in) {
        with_float_type(dtype_out, "add", "out", [&](auto to) {
            using T = typename decltype(in)::type;
            using Out = typename decltype(to)::type;
            const auto launch = [&](auto width) {
                constexpr int n = decltype(width)::value;
                add_kernel<T, Out, n><<<blocks_for<n>(size, "add"), kThreads, 0, stream>>>(
                    static_cast<const T*>(a), static_cast<const T*>(b), static_cast<Out*>(out), size, accumulate);
            };
            all_aligned({a, b, out}) ? launch(Width<vector_width<T, Out>>{}) : launch(Width<1>{});
        });
    });
    check_launch("add");
}

void cast(const void* x, void* y, int64_t size, bool accumulate, int dtype_x, int dtype_y, cudaStream_t stream) {
    check_positive(size, "cast", "size");
    check_pointer(x, "cast", "x", bytes_of(dtype_x));
    check_pointer(y, "cast", "y", bytes_of(dtype_y));
    check_accumulate(accumulate, dtype_y, "cast");
    with_float_type(dtype_x, "cast", "x", [&](auto in) {
        with_float_type(dtype_y, "cast", "y", [&](auto to) {
            using From = typename decltype(in)::type;
            using To = typename decltype(to)::type;
            const auto launch = [&](auto width) {
                constexpr int n = decltype(width)::value;
                cast_kernel<From, To, n><<<blocks_for<n>(size, "cast"), kThreads, 0, stream>>>(
                    static_cast<const From*>(x), static_cast<To*>(y), size, accumulate);
            };
            all_aligned({x, y}) ? launch(Width<vector_width<From, To>>{}) : launch(Width<1>{});
        });
    });
    check_launch("cast");
}

void fill(void* out, int64_t size, double value, int dtype, cudaStream_t stream) {
    check_positive(size, "fill", "size");
    check_pointer(out, "fill", "out", bytes_of(dtype));
    with_float_type(dtype, "fill", "out", [&](auto to) {
        using T = typename decltype(to)::type;
        const auto launch = [&](auto width) {
            constexpr int n = decltype(width)::value;
            fill_kernel<T, n><<<blocks_for<n>(size, "fill"), kThreads, 0, stream>>>(static_cast<T*>(out), size,
                                                                                    static_cast<float>(value));
        };
        all_aligned({out}) ? launch(Width<vector_width<T>>{}) : launch(Width<1>{});
    });
    check_launch("fill");
}

}  // namespace surogate
