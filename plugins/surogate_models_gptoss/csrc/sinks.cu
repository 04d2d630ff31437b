// Attention sinks, by the log-sum-exp of attention. T tokens, H heads of D elements:
//
//   add_sinks       out' [T,H D] = out / (1 + exp(sink - lse)),  lse' [H,T] = log(exp(lse) + exp(sink))
//   sinks_gradient  d_sinks [H] = -sum over tokens of exp(sink - lse') (dout' . out')
//
// out, out', dout' and sinks bf16; lse and lse' fp32; d_sinks fp32 or, written only, bf16; row-major, contiguous, aligned to 16 bytes. D is 64, 128 or
// 256. Arithmetic is fp32, and each output is rounded once. out' may be the buffer of out, lse' is a buffer of its own.
// Sums over tokens are in a fixed order: of a run of 256 tokens in a block, then over the runs.
//
// A thread has 8 elements of a head. Bytes, 8,192 tokens of 64 heads of 64: add_sinks 138 MB, 29 us at 4.8 TB/s;
// sinks_gradient 136 MB, 28 us.
#include "sinks.h"

#include <string>
#include <type_traits>

#include "surogate/check.h"
#include "surogate/reduce.cuh"
#include "surogate/sigmoid.cuh"
#include "surogate/sum_partials.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

using T = __nv_bfloat16;
using V = Vec<T>;

constexpr int threads = 256, run = 256;

__global__ void __launch_bounds__(threads)
    add_sinks_kernel(const T* out, const float* lse, const T* sinks, T* with, float* with_lse, int64_t words, int64_t tokens,
                     int of_token, int of_head) {
    const int64_t word = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (word >= words) {
        return;
    }
    const int64_t token = word / of_token;
    const int in_token = static_cast<int>(word % of_token), head = in_token / of_head;
    const int64_t at = head * tokens + token;
    const float sink = to_float(sinks[head]), own = lse[at];
    float x[V::size];
    V::load(out + word * V::size).to_float(x);
    const float kept = sigmoid<false>(own - sink).of;
#pragma unroll
    for (int i = 0; i < V::size; ++i) {
        x[i] *= kept;
    }
    V::from_float(x).store(with + word * V::size);
    if (in_token % of_head == 0) {
        with_lse[at] = fmaxf(own, sink) + log1pf(expf(-fabsf(own - sink)));
    }
}

// A group of `Lanes` threads has a token of the head. partial [runs, H].
template <int Lanes>
__global__ void __launch_bounds__(threads)
    sinks_gradient_kernel(const T* dout, const T* out, const float* lse, const T* sinks, float* partial, int64_t tokens,
                          int heads) {
    constexpr int of_block = threads / Lanes, dim = Lanes * V::size;
    __shared__ float sums[of_block];
    const int head = blockIdx.y, group = threadIdx.x / Lanes, lane = threadIdx.x % Lanes;
    const float sink = to_float(sinks[head]);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * run;
    float sum = 0.0f;
    for (int i = group; i < run; i += of_block) {
        const int64_t token = first + i;
        const bool exists = token < tokens;  // all lanes of a warp take part in its sums
        const int64_t at = ((exists ? token : 0) * heads + head) * dim + lane * V::size;
        float d[V::size], x[V::size], delta = 0.0f;
        V::load(dout + at).to_float(d);
        V::load(out + at).to_float(x);
#pragma unroll
        for (int c = 0; c < V::size; ++c) {
            delta = fmaf(d[c], x[c], delta);
        }
        delta = warp_sum<Lanes>(delta);
        if (exists && lane == 0) {
            sum -= expf(sink - lse[head * tokens + token]) * delta;
        }
    }
    if (lane == 0) {
        sums[group] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < of_block; ++i) {
            sum += sums[i];
        }
        partial[static_cast<int64_t>(blockIdx.x) * heads + head] = sum;
    }
}

int64_t runs_of(int64_t tokens) { return ceil_div(tokens, run); }

void check_sizes(int64_t tokens, int64_t heads, int64_t dim, const char* op) {
    check_positive(tokens, op, "tokens");
    check_positive(heads, op, "heads");
    SUROGATE_REQUIRE(dim == 64 || dim == 128 || dim == 256, op,
                     "heads must have 64, 128 or 256 elements, got " + std::to_string(dim));
}

}  // namespace

void add_sinks(const void* out, const void* lse, const void* sinks, void* with, void* with_lse, int64_t tokens,
               int64_t heads, int64_t dim, cudaStream_t stream) {
    constexpr auto op = "add_sinks";
    check_sizes(tokens, heads, dim, op);
    check_pointer(out, op, "out", 16);
    check_pointer(lse, op, "lse", 4);
    check_pointer(sinks, op, "sinks", 2);
    check_pointer(with, op, "the output", 16);
    check_pointer(with_lse, op, "the log-sum-exp", 4);
    SUROGATE_REQUIRE(lse != with_lse, op, "the log-sum-exp with sinks needs a buffer of its own");
    const int64_t of_head = dim / V::size, of_token = heads * of_head, words = tokens * of_token;
    add_sinks_kernel<<<to_int(ceil_div(words, threads), op, "elements / 2048"), threads, 0, stream>>>(
        static_cast<const T*>(out), static_cast<const float*>(lse), static_cast<const T*>(sinks), static_cast<T*>(with),
        static_cast<float*>(with_lse), words, tokens, to_int(of_token, op, "heads"), static_cast<int>(of_head));
    check_launch(op);
}

int64_t sinks_gradient_workspace(int64_t tokens, int64_t heads) { return runs_of(tokens) * heads * 4; }

void sinks_gradient(const void* dout, const void* out, const void* lse, const void* sinks, void* d_sinks, void* workspace,
                    int64_t tokens, int64_t heads, int64_t dim, bool accumulate, int dtype_d_sinks, cudaStream_t stream) {
    constexpr auto op = "sinks_gradient";
    check_sizes(tokens, heads, dim, op);
    check_pointer(dout, op, "dout", 16);
    check_pointer(out, op, "out", 16);
    check_pointer(lse, op, "lse", 4);
    check_pointer(sinks, op, "sinks", 2);
    check_pointer(d_sinks, op, "d_sinks", bytes_of(dtype_d_sinks));
    check_accumulate(accumulate, dtype_d_sinks, op);
    check_pointer(workspace, op, "the workspace", 4);
    const dim3 grid(to_int(runs_of(tokens), op, "tokens / 256"), to_int(heads, op, "heads"));
    auto* partial = static_cast<float*>(workspace);
    const auto launch = [&](auto lanes) {
        sinks_gradient_kernel<decltype(lanes)::value><<<grid, threads, 0, stream>>>(
            static_cast<const T*>(dout), static_cast<const T*>(out), static_cast<const float*>(lse),
            static_cast<const T*>(sinks), partial, tokens, static_cast<int>(heads));
    };
    dim == 64    ? launch(std::integral_constant<int, 8>{})
    : dim == 128 ? launch(std::integral_constant<int, 16>{})
                 : launch(std::integral_constant<int, 32>{});
    check_launch(op);
    sum_partials(partial, runs_of(tokens), heads, d_sinks, accumulate, dtype_d_sinks, op, stream);
}

}  // namespace surogate
