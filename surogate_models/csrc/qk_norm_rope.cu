// qk_norm_rope: RMS norm of every query and key head, then RoPE in the half layout. The v heads are copied.
//
//   n = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps), u = n * (w + offset)     for each head of D elements
//   y[i] = u[i] cos - u[i + D/2] sin,  y[i + D/2] = u[i + D/2] cos + u[i] sin,   angle = position * inv_freq[i]
//
// cos and sin denote attention_factor times the cosine and sine of the angle. If only the first rotary_dim elements of a
// head turn, they do as if they were the head, and of the others y = u.
//
// rope: without the norm, u = x. rope_bwd: rope with the opposite angles, applied to dy. All of them may work in place
// (out is the same buffer as the input); then the v heads are neither read nor written. rope and rope_bwd rotate the first
// rotary_dim elements of a head as the norm's ops do, and copy the others one element at a time. With a
// query_beta above 0, both multiply all elements of the H query heads by 1 + query_beta ln(1 + floor(position /
// query_length)), in fp32 before the output is rounded: one factor for each token, by a kernel of its own.
//
//   qkv, out, dy, d_qkv  [tokens, (H + 2G) D], columns [q; k; v], fp32 or bf16; D even, 2 to 256
//   q_norm, k_norm       [D] in the dtype of qkv
//   positions            [tokens] int32
//   inv_freq             [rotary_dim / 2] fp32, theta^(-2i/D), optionally scaled. The caller computes it by the operations of
//                        transformers, because it must have the same bits.
//
// Arithmetic is fp32, with accurate sincosf; each output is rounded once. Accesses are 16 bytes wide if pointers are
// aligned to 16 bytes and D/2 is a multiple of 8 (bf16) or 4 (fp32), otherwise one element wide. Grid: rope_heads.cuh.
//
// Bytes moved per element in bf16: 4; in place 4 per element of q and k. 4,096 tokens of Qwen3-8B (H 32, G 8, D 128):
// 100.7 MB, 24 us at 4.26 TB/s. An H200 takes 30 us; at 32,768 tokens it reaches 85-90 % of bandwidth.
#include <cuda_bf16.h>

#include <cstdint>

#include "qk_norm_rope.h"
#include "rope_heads.cuh"

namespace surogate {
namespace {

constexpr int at_once = 2;

// Heads `base`, `base` + slots, ... of a chunk: `at_once` per group, which are loaded together.
template <class T, int N, int P>
struct Batch {
    Head<T, N, P> heads[at_once];

    __device__ __forceinline__ void load(const T* first, int base, int count, int place, const RopeShape& s) {
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const int head = base + (k * 32 >> s.group_bits);
            heads[k].load(first + head * s.stride, place, s, head < count);
        }
    }
};

// No __restrict__ on qkv and out, which may be the same buffer: a lane reads its elements of a head before it writes
// them. q_norm and k_norm are read only if `with_norm`.
// With `with_factors`, query heads are multiplied by a factor of the position.
template <class T, int N, int P, bool with_norm, bool with_factors>
__global__ void __launch_bounds__(rope_threads, 8)
    forward_kernel(const T* qkv, const T* __restrict__ q_norm, const T* __restrict__ k_norm,
                   const int32_t* __restrict__ positions, const float* __restrict__ inv_freq, T* out, RopeShape s) {
    constexpr int E = N * P;
    __shared__ Pairs angles[rope_warps], weight;
    const Chunk chunk(s);
    const int warp = threadIdx.x / 32;
    const int64_t token = static_cast<int64_t>(blockIdx.x) * rope_warps + warp;
    const bool has_token = token < s.tokens;  // of the whole warp
    const int64_t row = token * s.row_size();
    if (chunk.is_values) {
        if (has_token) {
            copy_values<T, N>(qkv + row, out + row, chunk, s);
        }
        return;
    }
    const int place = threadIdx.x & (s.group() - 1);
    const int slot = threadIdx.x % 32 >> s.group_bits;
    const int64_t first = row + static_cast<int64_t>(chunk.first) * s.stride;
    const int count = has_token ? chunk.heads : 0;
    Batch<T, N, P> batch;
    batch.load(qkv + first, slot, count, place, s);
    const int32_t position = has_token ? positions[token] : 0;
    if constexpr (with_norm) {
        load_weight<T, N, P>(weight, chunk.is_queries ? q_norm : k_norm, s);
    }
    compute_angles<N, P>(angles[warp], position, inv_freq, s);
    float factor = 1;
    if constexpr (with_factors) {
        factor += s.query_beta * logf(1.0f + static_cast<float>(position / s.query_length));
    }
    [[maybe_unused]] const int scaled = s.scaled - chunk.first;  // heads of the chunk, or none if it is not positive
    // All groups run the same number of iterations, because the lanes of a warp shuffle together.
    for (int base = 0; base < count; base += at_once * 32 >> s.group_bits) {
        if (base > 0) {
            batch.load(qkv + first, base + slot, count, place, s);
        }
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            if (base + (k * 32 >> s.group_bits) >= count) {
                break;
            }
            const int head = base + slot + (k * 32 >> s.group_bits);
            Head<T, N, P>& x = batch.heads[k];
            float a[E], b[E];
            x.to_float(a, b);
            if constexpr (with_norm) {
                float squares = 0;
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    squares += a[i] * a[i] + b[i] * b[i];
                }
                const float rstd = __frsqrt_rn(group_sum(squares, s) / static_cast<float>(s.head_dim) + s.eps);
                float wa[E], wb[E];
                weight.load<N, P>(place, s, wa, wb);
                x.to_float(a, b);
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    a[i] *= rstd * wa[i];
                    b[i] *= rstd * wb[i];
                }
            }
            float c[E], z[E];
            angles[warp].load<N, P>(place, s, c, z);
#pragma unroll
            for (int i = 0; i < E; ++i) {
                const float turned = a[i] * c[i] - b[i] * z[i];
                b[i] = b[i] * c[i] + a[i] * z[i];
                a[i] = turned;
            }
            if constexpr (with_factors) {
                const float of_head = head < scaled ? factor : 1.0f;
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    a[i] *= of_head;
                    b[i] *= of_head;
                }
            }
            x.from_float(a, b);
            x.store(out + first + head * s.stride, place, s, head < count);
            __syncwarp();  // the floats in shared memory are read again for the next head: fewer registers
        }
    }
    if constexpr (with_factors) {
        if (s.stride > s.head_dim) {
            scale_rest(qkv + first, out + first, count, scaled, factor, s);
        }
    } else if constexpr (!with_norm) {
        if (s.stride > s.head_dim && qkv != out) {
            copy_rest(qkv + first, out + first, count, s);
        }
    }
}

template <class T, bool with_norm, bool with_factors>
void launch(const char* op, const void* qkv, const void* q_norm, const void* k_norm, const void* positions,
            const void* inv_freq, void* out, RopeShape s, cudaStream_t stream) {
    constexpr int n = Vec<T>::size;
    const auto kernel = choose_vectors<T>(s, {qkv, q_norm, k_norm, out}) ? forward_kernel<T, n, 1, with_norm, with_factors>
                                                                         : forward_kernel<T, 1, 4, with_norm, with_factors>;
    kernel<<<rope_grid(s, qkv == out, op), rope_threads, 0, stream>>>(
        static_cast<const T*>(qkv), static_cast<const T*>(q_norm), static_cast<const T*>(k_norm),
        static_cast<const int32_t*>(positions), static_cast<const float*>(inv_freq), static_cast<T*>(out), s);
    check_launch(op);
}

// `direction` is -1 for the opposite angles.
void turn(const char* op, const void* in, const void* positions, const void* inv_freq, void* out, int64_t tokens,
          int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, int64_t rotary_dim, double attention_factor,
          double query_beta, int64_t query_length, float direction, int dtype, cudaStream_t stream) {
    SUROGATE_REQUIRE(head_dim <= max_head_dim && rotary_dim <= head_dim, op,
                     "rotary_dim must be at most head_dim, and that 256, got " + std::to_string(rotary_dim) + " and " +
                         std::to_string(head_dim));
    SUROGATE_REQUIRE(query_beta >= 0 && query_length >= 1, op,
                     "query_beta must not be negative, and query_length positive, got " + std::to_string(query_beta) +
                         " and " + std::to_string(query_length));
    RopeShape s = checked_rope_shape(op, tokens, n_heads, n_kv_heads, rotary_dim, 0, attention_factor, dtype);
    s.scaled = s.queries;
    s.query_beta = static_cast<float>(query_beta);
    s.query_length = to_int(query_length, op, "query_length");
    s.stride = static_cast<int>(head_dim);
    s.queries += s.keys;
    s.keys = 0;
    s.query_chunks = static_cast<int>(ceil_div(s.queries, s.chunk_heads));
    s.key_chunks = 0;
    s.sin_scale *= direction;
    check_pointer(in, op, "in", bytes_of(dtype));
    check_pointer(positions, op, "positions", 4);
    check_pointer(inv_freq, op, "inv_freq", 4);
    check_pointer(out, op, "out", bytes_of(dtype));
    const bool with_factors = query_beta > 0;
    const auto launch_typed = dtype == FP32
                                  ? (with_factors ? launch<float, false, true> : launch<float, false, false>)
                                  : (with_factors ? launch<__nv_bfloat16, false, true>
                                                  : launch<__nv_bfloat16, false, false>);
    launch_typed(op, in, nullptr, nullptr, positions, inv_freq, out, s, stream);
}

}  // namespace

void rope(const void* qkv, const void* positions, const void* inv_freq, void* out, int64_t tokens, int64_t n_heads,
          int64_t n_kv_heads, int64_t head_dim, int64_t rotary_dim, double attention_factor, double query_beta,
          int64_t query_length, int dtype, cudaStream_t stream) {
    turn("rope", qkv, positions, inv_freq, out, tokens, n_heads, n_kv_heads, head_dim, rotary_dim, attention_factor,
         query_beta, query_length, 1, dtype, stream);
}

void rope_bwd(const void* dy, const void* positions, const void* inv_freq, void* d_qkv, int64_t tokens, int64_t n_heads,
              int64_t n_kv_heads, int64_t head_dim, int64_t rotary_dim, double attention_factor, double query_beta,
              int64_t query_length, int dtype, cudaStream_t stream) {
    turn("rope_bwd", dy, positions, inv_freq, d_qkv, tokens, n_heads, n_kv_heads, head_dim, rotary_dim,
         attention_factor, query_beta, query_length, -1, dtype, stream);
}

void qk_norm_rope(const void* qkv, const void* q_norm, const void* k_norm, const void* positions, const void* inv_freq,
                  void* out, int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, int64_t rotary_dim,
                  double eps, double offset, double attention_factor, int dtype, cudaStream_t stream) {
    constexpr const char* op = "qk_norm_rope";
    const RopeShape s =
        checked_norm_shape(op, tokens, n_heads, n_kv_heads, head_dim, rotary_dim, eps, offset, attention_factor, dtype);
    const uintptr_t element = bytes_of(dtype);
    check_pointer(qkv, op, "qkv", element);
    check_pointer(q_norm, op, "q_norm", element);
    check_pointer(k_norm, op, "k_norm", element);
    check_pointer(positions, op, "positions", 4);
    check_pointer(inv_freq, op, "inv_freq", 4);
    check_pointer(out, op, "out", element);
    const auto launch_typed = dtype == FP32 ? launch<float, true, false> : launch<__nv_bfloat16, true, false>;
    launch_typed(op, qkv, q_norm, k_norm, positions, inv_freq, out, s, stream);
}

}  // namespace surogate
