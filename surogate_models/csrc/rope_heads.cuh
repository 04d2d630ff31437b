// What the kernels of qk_norm_rope.cu and qk_norm_rope_bwd.cu share: how heads are divided over warps and lanes, access
// to heads, and cosines and sines.
//
// Grid: (blocks of tokens, chunks). A block has 4 warps; each processes one token at a time, and of this token the heads
// of one chunk: about 2,048 elements of q heads or of k heads. So a warp computes the cosines and sines of a token once
// for all these heads, does not wait for other warps, and a block needs only one of the two norm weights. Both are kept
// as floats in shared memory. The last chunk copies the v heads; it is not launched if the output is in place.
//
// A group of lanes (a power of two) processes a head; the groups of a warp process consecutive heads. A lane holds P runs
// of N consecutive pairs of elements. Elements i and i + D/2 are a pair; if only the first R elements of a head with a norm
// turn, i and i + R/2 of these, and of the others, whose angle is 0, each of the first half and the one (D - R) / 2 behind.
// A warp issues its first loads before it waits for the weight and the position, and the kernels keep registers few,
// because latency, not arithmetic, keeps them from the bandwidth.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {

constexpr int rope_warps = 4;
constexpr int rope_threads = 32 * rope_warps;
constexpr int max_head_dim = 256;
constexpr int chunk_elements = 2048;

struct RopeShape {
    int64_t tokens;
    int queries;   // heads with the weight q_norm; without norms, all heads that are rotated
    int keys;      // heads with the weight k_norm
    int values;    // heads that are copied
    int head_dim;  // D: elements of a head that the kernels process
    int stride;    // from one head to the next: D, or more where only the first D elements of a head are processed
    int turning;   // R/2: pairs of a head that turn, the first ones
    int chunk_heads;
    int query_chunks;
    int key_chunks;
    int group_bits;  // log2 of the number of lanes per head
    float eps;
    float offset;     // added to the norm weights
    float cos_scale;  // factors of the cosines and sines
    float sin_scale;
    int scaled;        // heads, the first ones, that are multiplied by a factor of the position
    int query_length;  // positions at which the factor is 1
    float query_beta;

    __host__ __device__ int group() const { return 1 << group_bits; }
    // The elements of pair i.
    __device__ __forceinline__ int first_of(int i) const { return i < turning ? i : i + turning; }
    __device__ __forceinline__ int second_of(int i) const { return i < turning ? i + turning : i + head_dim / 2; }
    __host__ __device__ int64_t row_size() const { return static_cast<int64_t>(queries + keys + values) * stride; }
};

// Heads that a block processes.
struct Chunk {
    int first;
    int heads;
    bool is_queries;
    bool is_values;

    __device__ explicit Chunk(const RopeShape& s) {
        const int index = blockIdx.y;
        is_queries = index < s.query_chunks;
        is_values = index == s.query_chunks + s.key_chunks;
        const int start = is_values ? 0 : (is_queries ? index : index - s.query_chunks) * s.chunk_heads;
        const int of_kind = is_values ? s.values : is_queries ? s.queries : s.keys;
        first = start + (is_values ? s.queries + s.keys : is_queries ? 0 : s.queries);
        heads = is_values ? of_kind : min(s.chunk_heads, of_kind - start);
    }
};

// First pair of a lane's run. `place` is the lane's number in its group.
template <int N>
__device__ __forceinline__ int run_start(int run, int place, const RopeShape& s) {
    return (place + (run << s.group_bits)) * N;
}

// A lane's elements of a head. Elements beyond D/2 are 0 and not stored.
template <class T, int N, int P>
struct Head {
    Packed<T, N> a[P], b[P];  // the first and the second elements of pairs

    // Without `active`, all elements are 0 and nothing is read.
    __device__ __forceinline__ void load(const T* head, int place, const RopeShape& s, bool active) {
        const int half = active ? s.head_dim / 2 : 0;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int first = run_start<N>(p, place, s);
            a[p] = b[p] = {};
            if (first < half) {
                a[p] = Packed<T, N>::load(head + s.first_of(first));
                b[p] = Packed<T, N>::load(head + s.second_of(first));
            }
        }
    }

    __device__ __forceinline__ void store(T* head, int place, const RopeShape& s, bool active) const {
        const int half = active ? s.head_dim / 2 : 0;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int first = run_start<N>(p, place, s);
            if (first < half) {
                a[p].store(head + s.first_of(first));
                b[p].store(head + s.second_of(first));
            }
        }
    }

    __device__ __forceinline__ void to_float(float (&x)[N * P], float (&y)[N * P]) {
#pragma unroll
        for (int p = 0; p < P; ++p) {
            a[p].to_float(x + p * N);
            b[p].to_float(y + p * N);
        }
    }

    __device__ __forceinline__ void from_float(const float (&x)[N * P], const float (&y)[N * P]) {
#pragma unroll
        for (int p = 0; p < P; ++p) {
            a[p] = Packed<T, N>::from_float(x + p * N);
            b[p] = Packed<T, N>::from_float(y + p * N);
        }
    }
};

// Two floats for each pair of a head, in shared memory: cosines and sines, or the weights of both elements. Beyond D/2
// they are 0.
struct Pairs {
    alignas(16) float a[max_head_dim / 2];
    alignas(16) float b[max_head_dim / 2];

    template <int N, int P>
    __device__ __forceinline__ void load(int place, const RopeShape& s, float (&x)[N * P], float (&y)[N * P]) const {
        constexpr int M = N < 4 ? N : 4;
#pragma unroll
        for (int i = 0; i < N * P; i += M) {
            const int first = run_start<N>(i / N, place, s) + i % N;
            const Vec<float, M> vx = Vec<float, M>::load(a + first), vy = Vec<float, M>::load(b + first);
#pragma unroll
            for (int k = 0; k < M; ++k) {
                x[i + k] = vx[k];
                y[i + k] = vy[k];
            }
        }
    }
};

// Computes cosines and sines of one token for the N * P pairs of each lane. All lanes of the warp must call it; it waits
// until they have read those of the previous token.
template <int N, int P>
__device__ __forceinline__ void compute_angles(Pairs& pairs, int32_t position, const float* inv_freq,
                                               const RopeShape& s) {
    __syncwarp();
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < N * P << s.group_bits; i += 32) {
        float sine = 0, cosine = 0;
        if (i < s.turning) {
            sincosf(__fmul_rn(static_cast<float>(position), inv_freq[i]), &sine, &cosine);
        }
        pairs.a[i] = i < s.turning ? cosine * s.cos_scale : 1.0f;
        pairs.b[i] = sine * s.sin_scale;
    }
    __syncwarp();
}

// All threads of the block must call it.
template <class T, int N, int P>
__device__ __forceinline__ void load_weight(Pairs& pairs, const T* weight, const RopeShape& s) {
    const int half = s.head_dim / 2;
    for (int i = threadIdx.x; i < N * P << s.group_bits; i += rope_threads) {
        pairs.a[i] = i < half ? to_float(weight[s.first_of(i)]) + s.offset : 0;
        pairs.b[i] = i < half ? to_float(weight[s.second_of(i)]) + s.offset : 0;
    }
    __syncthreads();
}

// Sum over the lanes of a group, in the same order on every lane. All lanes of the warp must call it.
__device__ __forceinline__ float group_sum(float x, const RopeShape& s) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        if (offset < s.group()) {
            x += __shfl_xor_sync(full_warp, x, offset);
        }
    }
    return x;
}

// Copies the v heads of a token. All lanes of the warp must call it.
template <class T, int N>
__device__ __forceinline__ void copy_values(const T* row, T* out, const Chunk& chunk, const RopeShape& s) {
    const int64_t end = static_cast<int64_t>(chunk.first + chunk.heads) * s.stride;
#pragma unroll 4
    for (int64_t i = static_cast<int64_t>(chunk.first) * s.stride + threadIdx.x % 32 * N; i < end; i += 32 * N) {
        Packed<T, N>::load(row + i).store(out + i);
    }
}

// Copies the elements from D on of `heads` heads. All lanes of the warp must call it.
template <class T>
__device__ __forceinline__ void copy_rest(const T* first, T* out, int heads, const RopeShape& s) {
    const int rest = s.stride - s.head_dim;
    for (int i = threadIdx.x % 32; i < heads * rest; i += 32) {
        const int at = i / rest * s.stride + s.head_dim + i % rest;
        out[at] = first[at];
    }
}

// As copy_rest, but multiplies the elements of the first `scaled` heads by `factor`. It may work in place.
template <class T>
__device__ __forceinline__ void scale_rest(const T* first, T* out, int heads, int scaled, float factor,
                                           const RopeShape& s) {
    const int rest = s.stride - s.head_dim;
    for (int i = threadIdx.x % 32; i < heads * rest; i += 32) {
        const int head = i / rest;
        const int at = head * s.stride + s.head_dim + i % rest;
        out[at] = head < scaled ? from_float<T>(to_float(first[at]) * factor) : first[at];
    }
}

// ------------------------------------------------------------------------------------------------------------ host

inline RopeShape checked_rope_shape(const char* op, int64_t tokens, int64_t n_heads, int64_t n_kv_heads,
                                    int64_t head_dim, double eps, double attention_factor, int dtype) {
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op,
                     std::string("dtype must be fp32 or bf16, got ") + name_of(dtype));
    check_positive(tokens, op, "tokens");
    check_positive(n_heads, op, "n_heads");
    check_positive(n_kv_heads, op, "n_kv_heads");
    SUROGATE_REQUIRE(n_heads <= 16384 && n_kv_heads <= 16384, op,
                     "n_heads and n_kv_heads must be at most 16384, got " + std::to_string(n_heads) + " and " +
                         std::to_string(n_kv_heads));
    SUROGATE_REQUIRE(head_dim >= 2 && head_dim <= max_head_dim && head_dim % 2 == 0, op,
                     "head_dim must be even and from 2 to 256, got " + std::to_string(head_dim));
    SUROGATE_REQUIRE(eps >= 0, op, "eps must not be negative, got " + std::to_string(eps));
    SUROGATE_REQUIRE(attention_factor > 0, op,
                     "attention_factor must be positive, got " + std::to_string(attention_factor));
    RopeShape s{};
    s.tokens = tokens;
    s.queries = static_cast<int>(n_heads);
    s.keys = s.values = static_cast<int>(n_kv_heads);
    s.head_dim = s.stride = static_cast<int>(head_dim);
    s.turning = s.head_dim / 2;
    s.chunk_heads = std::max(1, chunk_elements / s.head_dim);
    s.query_chunks = static_cast<int>(ceil_div(s.queries, s.chunk_heads));
    s.key_chunks = static_cast<int>(ceil_div(s.keys, s.chunk_heads));
    s.eps = static_cast<float>(eps);
    s.cos_scale = s.sin_scale = static_cast<float>(attention_factor);
    return s;
}

// The shape of ops with a norm. rotary_dim: R, the elements of a head that turn, the first ones.
inline RopeShape checked_norm_shape(const char* op, int64_t tokens, int64_t n_heads, int64_t n_kv_heads,
                                    int64_t head_dim, int64_t rotary_dim, double eps, double offset,
                                    double attention_factor, int dtype) {
    RopeShape s = checked_rope_shape(op, tokens, n_heads, n_kv_heads, head_dim, eps, attention_factor, dtype);
    SUROGATE_REQUIRE(rotary_dim >= 2 && rotary_dim <= head_dim && rotary_dim % 2 == 0, op,
                     "rotary_dim must be even and from 2 to head_dim, got " + std::to_string(rotary_dim));
    s.turning = static_cast<int>(rotary_dim / 2);
    s.offset = static_cast<float>(offset);
    return s;
}

// Whether 16-byte accesses are possible: all buffers are aligned, and D/2, R/2 and the stride are multiples of the vector
// size.
// Sets the group to the smallest power of two of lanes that hold a head.
template <class T>
bool choose_vectors(RopeShape& s, std::initializer_list<const void*> buffers) {
    constexpr int n = Vec<T>::size;
    const bool vectors =
        s.head_dim / 2 % n == 0 && s.turning % n == 0 && s.stride % n == 0 &&
        std::all_of(buffers.begin(), buffers.end(), [](const void* buffer) { return is_aligned(buffer, 16); });
    s.group_bits = vectors ? 0 : 5;
    while (vectors && s.group() * n < s.head_dim / 2) {
        ++s.group_bits;
    }
    return vectors;
}

// Blocks that process `s.tokens` tokens, at most `most` (0: any number), times the chunks.
inline dim3 rope_grid(const RopeShape& s, bool in_place, const char* op, int64_t most = 0) {
    int64_t blocks = ceil_div(s.tokens, rope_warps);
    if (most > 0) {
        blocks = std::min(blocks, most);
    }
    const int chunks = s.query_chunks + s.key_chunks + (in_place ? 0 : 1);
    return dim3(static_cast<unsigned>(to_int(blocks, op, "tokens")), static_cast<unsigned>(chunks));
}

}  // namespace surogate
