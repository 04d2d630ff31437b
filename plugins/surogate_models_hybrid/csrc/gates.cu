// The gated RMS norm of heads, and gates of attention. All of them read and write each element once.
//
// gated_rmsnorm: a quarter of a warp to a whole warp has a head, 8 elements a lane. Backward, with n = x rstd and s = silu(gate):
//   dn = dy w s     dx = rstd (dn - n mean(n dn))     d_gate = dy w n silu'(gate)     dw = sum over tokens and heads of dy n s
// Shares of dw are summed in registers by a fixed number of blocks, then in order.
//
// Bytes, 8,192 tokens of 32 heads of 128: 201 MB forward, 42 us at 4.8 TB/s; 336 MB backward, 70 us.

#include "hybrid.h"
#include "surogate/check.h"
#include "surogate/reduce.cuh"
#include "surogate/sigmoid.cuh"
#include "surogate/sum_partials.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

using T = __nv_bfloat16;
using V = Vec<T>;

constexpr int threads = 256, bwd_blocks = 1024;

template <int Lanes>
__global__ void __launch_bounds__(threads)
    gated_rmsnorm_kernel(const T* x, const T* gate, const T* w, T* y, float* rstd, int64_t heads, float eps) {
    constexpr int dim = Lanes * V::size, of_block = threads / Lanes;
    const int64_t head = static_cast<int64_t>(blockIdx.x) * of_block + threadIdx.x / Lanes;
    const bool exists = head < heads;  // all lanes of a warp take part in its sums
    const int column = threadIdx.x % Lanes * V::size;
    const int64_t at = (exists ? head : 0) * dim + column;
    float a[V::size], g[V::size], weight[V::size];
    V::load(x + at).to_float(a);
    V::load(gate + at).to_float(g);
    V::load(w + column).to_float(weight);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < V::size; ++i) {
        squares = fmaf(a[i], a[i], squares);
    }
    const float factor = rsqrtf(warp_sum<Lanes>(squares) / dim + eps);
#pragma unroll
    for (int i = 0; i < V::size; ++i) {
        a[i] = a[i] * factor * weight[i] * (g[i] * sigmoid<true>(g[i]).of);
    }
    if (exists) {
        V::from_float(a).store(y + at);
        if (column == 0) {
            rstd[head] = factor;
        }
    }
}

template <int Lanes, bool Weights>
__global__ void __launch_bounds__(threads)
    gated_rmsnorm_bwd_kernel(const T* dy, const T* x, const T* gate, const T* w, const float* rstd, T* dx, T* d_gate,
                             float* partial, int64_t heads) {
    constexpr int dim = Lanes * V::size, of_block = threads / Lanes;
    __shared__ float sums[Weights ? of_block : 1][Weights ? dim : 1];
    const int column = threadIdx.x % Lanes * V::size;
    float weight[V::size], of_weight[V::size] = {};
    V::load(w + column).to_float(weight);
    const int64_t at_once = static_cast<int64_t>(gridDim.x) * of_block, rounds = (heads + at_once - 1) / at_once;
    for (int64_t round = 0; round < rounds; ++round) {
        const int64_t head = (round * gridDim.x + blockIdx.x) * of_block + threadIdx.x / Lanes;
        const bool exists = head < heads;
        const int64_t at = (exists ? head : 0) * dim + column;
        float d[V::size], n[V::size], g[V::size];
        V::load(dy + at).to_float(d);
        V::load(x + at).to_float(n);
        V::load(gate + at).to_float(g);
        const float factor = rstd[exists ? head : 0];
        float mean = 0.0f;
#pragma unroll
        for (int i = 0; i < V::size; ++i) {
            n[i] *= factor;
            const Sigmoid s = sigmoid<true>(g[i]);
            const float silu = g[i] * s.of;
            of_weight[i] += exists ? d[i] * n[i] * silu : 0.0f;
            d[i] *= weight[i];
            g[i] = d[i] * n[i] * s.of * (1.0f + g[i] * s.complement);
            d[i] *= silu;
            mean = fmaf(d[i], n[i], mean);
        }
        mean = warp_sum<Lanes>(mean) / dim;
#pragma unroll
        for (int i = 0; i < V::size; ++i) {
            d[i] = factor * (d[i] - n[i] * mean);
        }
        if (exists) {
            V::from_float(d).store(dx + at);
            V::from_float(g).store(d_gate + at);
        }
    }
    if constexpr (Weights) {
#pragma unroll
        for (int i = 0; i < V::size; ++i) {
            sums[threadIdx.x / Lanes][column + i] = of_weight[i];
        }
        __syncthreads();
        for (int c = threadIdx.x; c < dim; c += threads) {
            float sum = 0.0f;
            for (int row = 0; row < of_block; ++row) {
                sum += sums[row][c];
            }
            partial[static_cast<int64_t>(blockIdx.x) * dim + c] = sum;
        }
    }
}

template <class Launch>
void with_lanes(int64_t dim, const char* op, Launch launch) {
    switch (dim) {
        case 64: return launch(std::integral_constant<int, 8>{});
        case 128: return launch(std::integral_constant<int, 16>{});
        case 256: return launch(std::integral_constant<int, 32>{});
        default: SUROGATE_REQUIRE(false, op, "heads must have 64, 128 or 256 elements, got " + std::to_string(dim));
    }
}

// A word of 16 bytes of x is one of qkv or of gate.
template <bool Join>
__global__ void __launch_bounds__(threads)
    move_gate_kernel(T* x, T* qkv, T* gate, int64_t words, int of_token, int of_heads, int of_head) {
    const int64_t word = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (word >= words) {
        return;
    }
    const int64_t token = word / of_token;
    const int i = static_cast<int>(word % of_token), head = i / (2 * of_head), in_head = i % (2 * of_head);
    const bool of_rest = i >= 2 * of_heads, of_gate = !of_rest && in_head >= of_head;
    T* other = of_gate   ? gate + (token * of_heads + head * of_head + in_head - of_head) * V::size
               : of_rest ? qkv + (token * (of_token - of_heads) + i - of_heads) * V::size
                         : qkv + (token * (of_token - of_heads) + head * of_head + in_head) * V::size;
    T* own = x + word * V::size;
    if constexpr (Join) {
        V::load(other).store(own);
    } else {
        V::load(own).store(other);
    }
}

template <bool Join>
void move_gate(const void* x, const void* qkv, const void* gate, int64_t tokens, int64_t heads, int64_t dim, int64_t rest,
               const char* op, cudaStream_t stream) {
    check_pointer(x, op, "x", 16);
    check_pointer(qkv, op, "qkv", 16);
    check_pointer(gate, op, "gate", 16);
    SUROGATE_REQUIRE(dim % V::size == 0 && rest % V::size == 0, op,
                     "widths must be multiples of 8, got " + std::to_string(dim) + " and " + std::to_string(rest));
    const int64_t of_token = (2 * heads * dim + rest) / V::size, words = tokens * of_token;
    check_positive(words, op, "elements");
    move_gate_kernel<Join><<<to_int(ceil_div(words, threads), op, "elements"), threads, 0, stream>>>(
        static_cast<T*>(const_cast<void*>(x)), static_cast<T*>(const_cast<void*>(qkv)), static_cast<T*>(const_cast<void*>(gate)),
        words, static_cast<int>(of_token), static_cast<int>(heads * dim / V::size), static_cast<int>(dim / V::size));
    check_launch(op);
}

// Columns of the projections of Qwen3-Next, by key heads, and sorted. Sizes are in words of 8 elements, of b and a in elements.
struct KeyHeads {
    int64_t tokens;
    int key_heads, of_key, of_values;  // words of a key of a head, and of the values that share it
    int heads, shared;                 // value heads, and those of a key head

    __host__ __device__ int of_head() const { return 2 * of_key + 2 * of_values; }
    __host__ __device__ int64_t words() const { return tokens * key_heads * of_head(); }
    __host__ __device__ int64_t numbers() const { return tokens * 2 * heads; }
};

// A thread moves a word of qkvz, or behind these a number of ba.
template <bool Join>
__global__ void __launch_bounds__(threads) move_key_heads_kernel(T* qkvz, T* ba, T* qkv, T* z, T* sorted, KeyHeads d) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (i < d.words()) {
        const int of_token = d.key_heads * d.of_head();
        const int64_t token = i / of_token;
        const int head = static_cast<int>(i % of_token) / d.of_head(), at = static_cast<int>(i % of_token) % d.of_head();
        const int keys = d.key_heads * d.of_key, values = d.key_heads * d.of_values, behind = at - 2 * d.of_key;
        T* row = qkv + token * (2 * keys + values) * V::size;
        T* other = at < d.of_key           ? row + (head * d.of_key + at) * V::size
                   : behind < 0            ? row + (keys + head * d.of_key + at - d.of_key) * V::size
                   : behind < d.of_values  ? row + (2 * keys + head * d.of_values + behind) * V::size
                                           : z + (token * values + head * d.of_values + behind - d.of_values) * V::size;
        T* own = qkvz + i * V::size;
        if constexpr (Join) {
            V::load(other).store(own);
        } else {
            V::load(own).store(other);
        }
        return;
    }
    const int64_t number = i - d.words();
    if (number >= d.numbers()) {
        return;
    }
    const int64_t token = number / (2 * d.heads);
    const int column = static_cast<int>(number % (2 * d.heads)), head = column / (2 * d.shared);
    const int at = column % (2 * d.shared), of_a = at / d.shared;
    T* other = sorted + token * 2 * d.heads + of_a * d.heads + head * d.shared + at % d.shared;
    if constexpr (Join) {
        ba[number] = *other;
    } else {
        *other = ba[number];
    }
}

template <bool Join>
void move_key_heads(const void* qkvz, const void* ba, const void* qkv, const void* z, const void* sorted, int64_t tokens,
                    int64_t key_heads, int64_t heads, int64_t k_dim, int64_t v_dim, const char* op, cudaStream_t stream) {
    check_pointer(qkvz, op, "qkvz", 16);
    check_pointer(qkv, op, "qkv", 16);
    check_pointer(z, op, "z", 16);
    check_pointer(ba, op, "ba", 2);
    check_pointer(sorted, op, "sorted ba", 2);
    check_positive(tokens, op, "tokens");
    check_positive(key_heads, op, "key heads");
    SUROGATE_REQUIRE(heads > 0 && heads % key_heads == 0, op,
                     "value heads must be a multiple of key heads, got " + std::to_string(heads));
    SUROGATE_REQUIRE(k_dim > 0 && v_dim > 0 && k_dim % V::size == 0 && v_dim % V::size == 0, op,
                     "heads must have multiples of 8 elements, got " + std::to_string(k_dim) + " and " + std::to_string(v_dim));
    const int64_t shared = heads / key_heads;
    const KeyHeads d{tokens,
                     to_int(key_heads, op, "key heads"),
                     to_int(k_dim / V::size, op, "elements of a key"),
                     to_int(shared * v_dim / V::size, op, "elements of values"),
                     to_int(heads, op, "value heads"),
                     to_int(shared, op, "value heads of a key head")};
    const auto mutable_of = [](const void* pointer) { return static_cast<T*>(const_cast<void*>(pointer)); };
    move_key_heads_kernel<Join><<<to_int(ceil_div(d.words() + d.numbers(), threads), op, "elements"), threads, 0, stream>>>(
        mutable_of(qkvz), mutable_of(ba), mutable_of(qkv), mutable_of(z), mutable_of(sorted), d);
    check_launch(op);
}

__global__ void __launch_bounds__(threads) sigmoid_gate_kernel(const T* x, const T* gate, T* y, int64_t words) {
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) * V::size;
    if (at >= words * V::size) {
        return;
    }
    float a[V::size], g[V::size];
    V::load(x + at).to_float(a);
    V::load(gate + at).to_float(g);
#pragma unroll
    for (int i = 0; i < V::size; ++i) {
        a[i] *= sigmoid<true>(g[i]).of;
    }
    V::from_float(a).store(y + at);
}

__global__ void __launch_bounds__(threads)
    sigmoid_gate_bwd_kernel(const T* dy, const T* x, const T* gate, T* dx, T* d_gate, int64_t words) {
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) * V::size;
    if (at >= words * V::size) {
        return;
    }
    float d[V::size], a[V::size], g[V::size];
    V::load(dy + at).to_float(d);
    V::load(x + at).to_float(a);
    V::load(gate + at).to_float(g);
#pragma unroll
    for (int i = 0; i < V::size; ++i) {
        const Sigmoid s = sigmoid<true>(g[i]);
        g[i] = d[i] * a[i] * s.of * s.complement;
        d[i] *= s.of;
    }
    V::from_float(d).store(dx + at);
    V::from_float(g).store(d_gate + at);
}

int word_blocks(int64_t size, const char* op) {
    check_positive(size, op, "elements");
    SUROGATE_REQUIRE(size % V::size == 0, op, "elements must be a multiple of 8, got " + std::to_string(size));
    return to_int(ceil_div(size / V::size, threads), op, "elements / 2048");
}

}  // namespace

void gated_rmsnorm(const void* x, const void* gate, const void* w, void* y, void* rstd, int64_t tokens, int64_t heads,
                   int64_t dim, double eps, cudaStream_t stream) {
    constexpr auto op = "gated_rmsnorm";
    check_pointer(x, op, "x", 16);
    check_pointer(gate, op, "gate", 16);
    check_pointer(w, op, "w", 16);
    check_pointer(y, op, "y", 16);
    check_pointer(rstd, op, "rstd", 4);
    const int64_t rows = tokens * heads;
    check_positive(rows, op, "heads");
    with_lanes(dim, op, [&](auto of_head) {
        constexpr int lanes = decltype(of_head)::value;
        const int blocks = to_int(ceil_div(rows, threads / lanes), op, "heads");
        gated_rmsnorm_kernel<lanes><<<blocks, threads, 0, stream>>>(
            static_cast<const T*>(x), static_cast<const T*>(gate), static_cast<const T*>(w), static_cast<T*>(y),
            static_cast<float*>(rstd), rows, static_cast<float>(eps));
        check_launch(op);
    });
}

int64_t gated_rmsnorm_bwd_workspace(int64_t dim) { return bwd_blocks * dim * static_cast<int64_t>(sizeof(float)); }

void gated_rmsnorm_bwd(const void* dy, const void* x, const void* gate, const void* w, const void* rstd, void* dx,
                       void* d_gate, void* dw, void* workspace, int64_t tokens, int64_t heads, int64_t dim, bool accumulate,
                       int dtype_dw, cudaStream_t stream) {
    constexpr auto op = "gated_rmsnorm_bwd";
    check_pointer(dy, op, "dy", 16);
    check_pointer(x, op, "x", 16);
    check_pointer(gate, op, "gate", 16);
    check_pointer(w, op, "w", 16);
    check_pointer(rstd, op, "rstd", 4);
    check_pointer(dx, op, "dx", 16);
    check_pointer(d_gate, op, "d_gate", 16);
    if (dw) {
        check_pointer(dw, op, "dw", bytes_of(dtype_dw));
        check_pointer(workspace, op, "workspace", 4);
    }
    const int64_t rows = tokens * heads;
    check_positive(rows, op, "heads");
    auto* partial = static_cast<float*>(workspace);
    with_lanes(dim, op, [&](auto of_head) {
        constexpr int lanes = decltype(of_head)::value;
        const auto kernel = dw ? gated_rmsnorm_bwd_kernel<lanes, true> : gated_rmsnorm_bwd_kernel<lanes, false>;
        kernel<<<bwd_blocks, threads, 0, stream>>>(static_cast<const T*>(dy), static_cast<const T*>(x),
                                                   static_cast<const T*>(gate), static_cast<const T*>(w),
                                                   static_cast<const float*>(rstd), static_cast<T*>(dx),
                                                   static_cast<T*>(d_gate), partial, rows);
        check_launch(op);
    });
    if (dw) {
        sum_partials(partial, bwd_blocks, dim, dw, accumulate, dtype_dw, op, stream);
    }
}

void split_gate(const void* x, void* qkv, void* gate, int64_t tokens, int64_t heads, int64_t dim, int64_t rest,
                cudaStream_t stream) {
    move_gate<false>(x, qkv, gate, tokens, heads, dim, rest, "split_gate", stream);
}

void join_gate(const void* qkv, const void* gate, void* x, int64_t tokens, int64_t heads, int64_t dim, int64_t rest,
               cudaStream_t stream) {
    move_gate<true>(x, qkv, gate, tokens, heads, dim, rest, "join_gate", stream);
}

void split_key_heads(const void* qkvz, const void* ba, void* qkv, void* z, void* sorted, int64_t tokens, int64_t key_heads,
                     int64_t heads, int64_t k_dim, int64_t v_dim, cudaStream_t stream) {
    move_key_heads<false>(qkvz, ba, qkv, z, sorted, tokens, key_heads, heads, k_dim, v_dim, "split_key_heads", stream);
}

void join_key_heads(const void* qkv, const void* z, const void* sorted, void* qkvz, void* ba, int64_t tokens,
                    int64_t key_heads, int64_t heads, int64_t k_dim, int64_t v_dim, cudaStream_t stream) {
    move_key_heads<true>(qkvz, ba, qkv, z, sorted, tokens, key_heads, heads, k_dim, v_dim, "join_key_heads", stream);
}

void sigmoid_gate(const void* x, const void* gate, void* y, int64_t size, cudaStream_t stream) {
    constexpr auto op = "sigmoid_gate";
    check_pointer(x, op, "x", 16);
    check_pointer(gate, op, "gate", 16);
    check_pointer(y, op, "y", 16);
    sigmoid_gate_kernel<<<word_blocks(size, op), threads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(gate), static_cast<T*>(y), size / V::size);
    check_launch(op);
}

void sigmoid_gate_bwd(const void* dy, const void* x, const void* gate, void* dx, void* d_gate, int64_t size,
                      cudaStream_t stream) {
    constexpr auto op = "sigmoid_gate_bwd";
    check_pointer(dy, op, "dy", 16);
    check_pointer(x, op, "x", 16);
    check_pointer(gate, op, "gate", 16);
    check_pointer(dx, op, "dx", 16);
    check_pointer(d_gate, op, "d_gate", 16);
    sigmoid_gate_bwd_kernel<<<word_blocks(size, op), threads, 0, stream>>>(
        static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(gate), static_cast<T*>(dx),
        static_cast<T*>(d_gate), size / V::size);
    check_launch(op);
}

}  // namespace surogate
