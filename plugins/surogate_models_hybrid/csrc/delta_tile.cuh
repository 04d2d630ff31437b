// Tiles, sizes and the workspace of the kernels of the gated delta rule (delta.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <string>

#include "delta.h"
#include "surogate/check.h"
#include "surogate/mma.cuh"
#include "surogate/reduce.cuh"
#include "surogate/shared_memory.h"

namespace surogate::delta {

using T = __nv_bfloat16;

constexpr int chunk = 64, dim = 128;
constexpr int wide = dim + 8, narrow = chunk + 8;  // rows of tiles in shared memory: no two of 8 rows share banks

struct Sizes {
    int tokens, chunks, k_heads, v_heads, share;

    __host__ __device__ int64_t qkv_row() const { return static_cast<int64_t>(2 * k_heads + v_heads) * dim; }
    __host__ __device__ int64_t values_row() const { return static_cast<int64_t>(v_heads) * dim; }
};

inline Sizes checked_sizes(int64_t tokens, int64_t k_heads, int64_t v_heads, const char* op) {
    check_positive(tokens, op, "tokens");
    check_positive(k_heads, op, "n_k_heads");
    check_positive(v_heads, op, "n_v_heads");
    SUROGATE_REQUIRE(tokens % chunk == 0, op, "tokens must be a multiple of 64, got " + std::to_string(tokens));
    SUROGATE_REQUIRE(v_heads % k_heads == 0, op,
                     std::to_string(k_heads) + " key heads do not divide " + std::to_string(v_heads) + " value heads");
    const int64_t share = v_heads / k_heads;
    return {to_int(tokens, op, "tokens"), to_int(tokens / chunk, op, "chunks"), to_int(k_heads, op, "n_k_heads"),
            to_int(v_heads, op, "n_v_heads"), static_cast<int>(share)};
}

// What prepare.cu makes of the inputs.
//   q, k         [Hk, T, D]: normed, q times D^-0.5. Elements of a head are in another order (`place_of`)
//   solve, scores  [Hv, T / 64, 64, 64]: A and P, rows i
//   decay, reads, left, beta  [Hv, T]: G, and the factors of delta.h
//   pieces       the number of pieces, then the chunk in which each begins: 0, and those in which a document begins
struct Prepared {
    T *q, *k, *solve, *scores;
    float *decay, *reads, *left, *beta;
    int* pieces;
};

// Divides a workspace into arrays that begin at multiples of 256 bytes.
class Division {
public:
    explicit Division(void* begin) : begin_(static_cast<char*>(begin)) {}
    template <class E>
    E* next(int64_t elements) {
        char* at = begin_ + bytes_;
        bytes_ += ceil_div(elements * static_cast<int64_t>(sizeof(E)), 256) * 256;
        return reinterpret_cast<E*>(at);
    }
    int64_t bytes() const { return bytes_; }

private:
    char* begin_;
    int64_t bytes_ = 0;
};

inline Prepared prepared_in(Division& division, const Sizes& sizes) {
    const int64_t tokens = sizes.tokens, keys = tokens * sizes.k_heads * dim, of_head = tokens * sizes.v_heads;
    Prepared p{};
    p.q = division.next<T>(keys);
    p.k = division.next<T>(keys);
    p.solve = division.next<T>(of_head * chunk);
    p.scores = division.next<T>(of_head * chunk);
    p.decay = division.next<float>(of_head);
    p.reads = division.next<float>(of_head);
    p.left = division.next<float>(of_head);
    p.beta = division.next<float>(of_head);
    p.pieces = division.next<int>(sizes.chunks + 1);
    return p;
}

struct Inputs {
    const T *qkv, *ba;
    const float *a_log, *dt_bias;
    const int* positions;
};

inline Inputs inputs_of(const void* qkv, const void* ba, const void* a_log, const void* dt_bias, const void* positions,
                        const char* op) {
    check_pointer(qkv, op, "qkv", 16);
    check_pointer(ba, op, "ba", 4);
    check_pointer(a_log, op, "a_log", 4);
    check_pointer(dt_bias, op, "dt_bias", 4);
    check_pointer(positions, op, "positions", 4);
    return {static_cast<const T*>(qkv), static_cast<const T*>(ba), static_cast<const float*>(a_log),
            static_cast<const float*>(dt_bias), static_cast<const int*>(positions)};
}

void prepare(const Inputs& inputs, const Prepared& prepared, const Sizes& sizes, cudaStream_t stream);
// out or states: null if it is not written.
void scan(const Inputs& inputs, const Prepared& prepared, const Sizes& sizes, T* out, T* states, cudaStream_t stream);

// ---------------------------------------------------------------------------------------------------------- device code

// The place of element i of a query or key in `Prepared`. A lane of a product of which the elements are the terms or the
// columns has places 16 s + 2 t, 16 s + 8 + 2 t and those behind them, with t = lane % 4: so it has 8 elements of a state that
// follow each other in memory, and four lanes have 32.
__device__ __forceinline__ int place_of(int i) {
    return 32 * (i / 32) + 16 * (i / 4 % 2) + 8 * (i / 2 % 2) + 2 * (i / 8 % 4) + i % 2;
}

// Writes rows of a state [values, keys], bf16, that are in registers as the operand A of a product over the keys, [16, D]:
// rows lane / 4 and 8 below. `to`: the first row of 16.
__device__ __forceinline__ void store_state(T* to, const uint32_t (&state)[dim / 16][4]) {
    const int lane = threadIdx.x % 32;
    to += lane / 4 * dim + 8 * (lane % 4);
#pragma unroll
    for (int s = 0; s < dim / 16; s += 2) {
        const uint4 low = {state[s][0], state[s][2], state[s + 1][0], state[s + 1][2]};
        const uint4 high = {state[s][1], state[s][3], state[s + 1][1], state[s + 1][3]};
        *reinterpret_cast<uint4*>(to + 16 * s) = low;
        *reinterpret_cast<uint4*>(to + 16 * s + 8 * dim) = high;
    }
}

// Writes, for each of 64 tokens, the number of documents that begin in the chunk up to it. Of a whole warp: a lane has the
// positions of tokens lane and 32 + lane.
__device__ __forceinline__ void count_documents(int (&document)[chunk], const int (&positions)[2]) {
    const int lane = threadIdx.x % 32;
    int before = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned begins = __ballot_sync(full_warp, positions[half] == 0);
        document[half * 32 + lane] = before + __popc(begins & (full_warp >> (31 - lane)));
        before += __popc(begins);
    }
}

// Copies rows of `Columns` elements to shared memory. `from`: of the first row.
template <int Columns, int Rows, int Threads>
__device__ __forceinline__ void copy_rows(T* to, int row, const T* from, int64_t from_row) {
    constexpr int words = Columns / 8;
    static_assert(Rows * words % Threads == 0 || Rows * words < Threads);
#pragma unroll
    for (int i = 0; i < (Rows * words + Threads - 1) / Threads; ++i) {
        const int word = static_cast<int>(threadIdx.x) + i * Threads, r = word / words, c = word % words * 8;
        if (Rows * words >= Threads || word < Rows * words) {
            copy_async(to + r * row + c, from + r * from_row + c, true);
        }
    }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
}

__device__ __forceinline__ float2 unpack(uint32_t word) {
    __nv_bfloat162 pair;
    memcpy(&pair, &word, sizeof(word));
    return __bfloat1622float2(pair);
}

// The operands of multiply_add from a tile in shared memory with rows of `row` elements. A has rows m to m + 15 and terms k
// to k + 15. B has terms k to k + 15 and columns n to n + 15: two operands, out[0], out[1] and out[2], out[3].

// A, of a tile [m][k].
__device__ __forceinline__ void load_a(uint32_t (&out)[4], const T* tile, int row, int m, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices<false>(out, tile + (m + lane % 16) * row + k + lane / 16 * 8);
}
// A, of a tile [k][m].
__device__ __forceinline__ void load_a_transposed(uint32_t (&out)[4], const T* tile, int row, int m, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices<true>(out, tile + (k + lane % 8 + lane / 16 * 8) * row + m + lane / 8 % 2 * 8);
}
// B, of a tile [n][k].
__device__ __forceinline__ void load_b(uint32_t (&out)[4], const T* tile, int row, int n, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices<false>(out, tile + (n + lane % 8 + lane / 16 * 8) * row + k + lane / 8 % 2 * 8);
}
// B, of a tile [k][n].
__device__ __forceinline__ void load_b_transposed(uint32_t (&out)[4], const T* tile, int row, int n, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices<true>(out, tile + (k + lane % 8 + lane / 8 % 2 * 8) * row + n + lane / 16 * 8);
}

// B of 8 columns and terms k to k + 31: two operands, of 16 terms each, of a tile [n][k].
__device__ __forceinline__ void load_b_of_8(uint32_t (&out)[4], const T* tile, int row, int n, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices<false>(out, tile + (n + lane % 8) * row + k + lane / 8 * 8);
}
// The same of a tile [k][n].
__device__ __forceinline__ void load_b_transposed_of_8(uint32_t (&out)[4], const T* tile, int row, int n, int k) {
    load_matrices<true>(out, tile + (k + static_cast<int>(threadIdx.x) % 32) * row + n);
}

// Adds a product with 16 columns to two sums.
__device__ __forceinline__ void add_pair(float (&first)[4], float (&second)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
    multiply_add(first, a, b[0], b[1]);
    multiply_add(second, a, b[2], b[3]);
}

// Sums of 16 columns as the operand A of a product over these columns.
__device__ __forceinline__ void as_a(uint32_t (&out)[4], const float (&first)[4], const float (&second)[4]) {
    out[0] = pack(first[0], first[1]);
    out[1] = pack(first[2], first[3]);
    out[2] = pack(second[0], second[1]);
    out[3] = pack(second[2], second[3]);
}

template <int N>
__device__ __forceinline__ void clear(float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[n][e] = 0.0f;
        }
    }
}

// The decay of a token: g = -exp(a_log) softplus(a + dt_bias).
struct Decay {
    float g, rate, slope;  // rate: -exp(a_log); slope: the derivative of softplus
};
__device__ __forceinline__ Decay decay_of(float a, float a_log, float dt_bias) {
    const float x = a + dt_bias, rate = -expf(a_log);
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    return {rate * softplus, rate, 1.0f / (1.0f + expf(-x))};
}

}  // namespace surogate::delta
