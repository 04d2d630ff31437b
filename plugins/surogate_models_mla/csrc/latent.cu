// Moves of multi-head latent attention. T tokens, H heads; N elements of a head without RoPE, R with RoPE, V of a value,
// D = N + R. ops.py has the ops:
//
//   latent_split   x [T,C+R] -> latent [T,C], rotated [T,R]
//   latent_qkv     q [T,H,N+R], kv [T,H,N+V], rotated [T,R] -> qkv [T,3H,D]: of a head of queries and keys the R elements
//                  first, with `interleaved` the first ones of all pairs, then the second ones; of values zeros behind V
//   latent_values  y [T,H,from] -> [T,H,to]
//
// and the transposes of the first two; the third is its own, with the widths exchanged. bf16, row-major, contiguous,
// aligned to 16 bytes. A thread moves 8 elements. N, V, C and widths are multiples of 8, R of 16.
//
// latent_qkv_bwd sums d_rotated over the heads in fp32, in their order, and rounds once.
//
// Bytes, 8,192 tokens of 20 heads of 192 + 64, values of 256, bf16: latent_qkv reads 232 MB and writes 252, 0.1 ms at
// 4.8 TB/s; its transpose the same.
#include "latent.h"

#include <string>

#include "surogate/check.h"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

constexpr int threads = 256, width = 8, pairs = width / 2;

using T = __nv_bfloat16;
using V = Vec<T, width>;

__device__ __forceinline__ void copy(const T* from, T* to) {
    V::load(from).store(to);
}

__device__ __forceinline__ void zero(T* to) {
    const float none[width] = {};
    V::from_float(none).store(to);
}

// 8 elements at `at` of R in the half layout, of a head whose pairs are side by side.
__device__ __forceinline__ void halves(const T* head, T* to, int at, int rotary) {
    const int half = rotary / 2, second = at >= half, first_pair = at - second * half;
    float low[width], high[width], out[width];
    V::load(head + 2 * first_pair).to_float(low);
    V::load(head + 2 * first_pair + width).to_float(high);
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
        out[i] = second ? low[2 * i + 1] : low[2 * i];
        out[pairs + i] = second ? high[2 * i + 1] : high[2 * i];
    }
    V::from_float(out).store(to);
}

// 4 pairs from element `at` of R, of two halves: the first and second elements of the pairs.
__device__ __forceinline__ void join(const float (&first)[pairs], const float (&second)[pairs], float (&out)[width]) {
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
        out[2 * i] = first[i];
        out[2 * i + 1] = second[i];
    }
}

__device__ __forceinline__ void load_pairs(const T* head, int at, int rotary, float (&out)[width]) {
    float first[pairs], second[pairs];
    Vec<T, pairs>::load(head + at / 2).to_float(first);
    Vec<T, pairs>::load(head + rotary / 2 + at / 2).to_float(second);
    join(first, second, out);
}

__global__ void __launch_bounds__(threads)
    split_kernel(const T* x, T* latent, T* rotated, int64_t words, int rank, int rotary, bool transposed) {
    const int64_t word = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (word >= words) {
        return;
    }
    const int columns = rank + rotary, of_row = columns / width;
    const int64_t token = word / of_row;
    const int column = static_cast<int>(word % of_row) * width;
    T* whole = const_cast<T*>(x) + word * width;
    T* part = column < rank ? latent + token * rank + column : rotated + token * rotary + column - rank;
    transposed ? copy(part, whole) : copy(whole, part);
}

__global__ void __launch_bounds__(threads)
    qkv_kernel(const T* q, const T* kv, const T* rotated, T* qkv, int64_t words, int heads, int nope, int rotary, int v_dim,
               bool interleaved) {
    const int64_t word = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (word >= words) {
        return;
    }
    const int dim = nope + rotary, of_head = dim / width, of_token = 3 * heads * of_head;
    const int64_t token = word / of_token;
    const int in_token = static_cast<int>(word % of_token), at = in_token % of_head * width;
    const int part = in_token / of_head / heads, head = in_token / of_head % heads;
    const T* query = q + (token * heads + head) * dim;
    const T* key = kv + (token * heads + head) * (nope + v_dim);
    T* to = qkv + word * width;
    if (part == 2) {
        at < v_dim ? copy(key + nope + at, to) : zero(to);
    } else if (at >= rotary) {
        copy((part == 0 ? query : key) + at - rotary, to);
    } else {
        const T* turned = part == 0 ? query + nope : rotated + token * rotary;
        interleaved ? halves(turned, to, at, rotary) : copy(turned + at, to);
    }
}

__global__ void __launch_bounds__(threads)
    qkv_bwd_kernel(const T* dqkv, T* dq, T* dkv, T* d_rotated, int64_t words, int heads, int nope, int rotary, int v_dim,
                   bool interleaved) {
    const int64_t word = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (word >= words) {
        return;
    }
    const int dim = nope + rotary, of_query = dim / width, of_key = (nope + v_dim) / width;
    const int of_token = heads * (of_query + of_key) + rotary / width;
    const int64_t token = word / of_token;
    int in_token = static_cast<int>(word % of_token);
    const T* own = dqkv + token * 3 * heads * dim;
    float x[width];
    if (in_token < heads * of_query) {
        const int head = in_token / of_query, at = in_token % of_query * width;
        T* to = dq + (token * heads + head) * dim + at;
        const T* from = own + head * dim;
        if (at < nope) {
            copy(from + rotary + at, to);
        } else if (interleaved) {
            load_pairs(from, at - nope, rotary, x);
            V::from_float(x).store(to);
        } else {
            copy(from + at - nope, to);
        }
        return;
    }
    in_token -= heads * of_query;
    if (in_token < heads * of_key) {
        const int head = in_token / of_key, at = in_token % of_key * width;
        T* to = dkv + (token * heads + head) * (nope + v_dim) + at;
        const T* keys = own + (heads + head) * dim;
        copy(at < nope ? keys + rotary + at : keys + heads * dim + at - nope, to);
        return;
    }
    const int at = (in_token - heads * of_key) * width;
    float sum[width] = {};
    for (int head = 0; head < heads; ++head) {
        const T* from = own + (heads + head) * dim;
        if (interleaved) {
            load_pairs(from, at, rotary, x);
        } else {
            V::load(from + at).to_float(x);
        }
#pragma unroll
        for (int i = 0; i < width; ++i) {
            sum[i] += x[i];
        }
    }
    V::from_float(sum).store(d_rotated + token * rotary + at);
}

__global__ void __launch_bounds__(threads) values_kernel(const T* y, T* out, int64_t words, int from, int to) {
    const int64_t word = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (word >= words) {
        return;
    }
    const int of_head = to / width, at = static_cast<int>(word % of_head) * width;
    const int64_t head = word / of_head;
    at < from ? copy(y + head * from + at, out + word * width) : zero(out + word * width);
}

void check_multiple(int64_t size, int64_t multiple, const char* op, const char* name) {
    check_positive(size, op, name);
    SUROGATE_REQUIRE(size % multiple == 0, op,
                     std::string(name) + " must be a multiple of " + std::to_string(multiple) + ", got " +
                         std::to_string(size));
}

void check_heads(int64_t tokens, int64_t heads, int64_t nope, int64_t rotary, int64_t v_dim, const char* op) {
    check_positive(tokens, op, "tokens");
    check_positive(heads, op, "heads");
    check_multiple(nope, width, op, "elements without RoPE");
    check_multiple(rotary, 2 * width, op, "elements with RoPE");
    check_multiple(v_dim, width, op, "elements of a value");
    SUROGATE_REQUIRE(v_dim <= nope + rotary, op, "values must not be wider than keys");
}

unsigned blocks_of(int64_t words, const char* op) {
    return static_cast<unsigned>(to_int(ceil_div(words, threads), op, "elements / 2048"));
}

void split(const void* x, void* latent, void* rotated, int64_t tokens, int64_t rank, int64_t rotary,
           bool transposed, const char* op, cudaStream_t stream) {
    check_positive(tokens, op, "tokens");
    check_multiple(rank, width, op, "rank");
    check_multiple(rotary, width, op, "elements with RoPE");
    check_pointer(x, op, "x", 16);
    check_pointer(latent, op, "latent", 16);
    check_pointer(rotated, op, "rotated", 16);
    const int64_t words = tokens * (rank + rotary) / width;
    split_kernel<<<blocks_of(words, op), threads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<T*>(latent), static_cast<T*>(rotated), words, to_int(rank, op, "rank"),
        static_cast<int>(rotary), transposed);
    check_launch(op);
}

}  // namespace

void latent_split(const void* x, void* latent, void* rotated, int64_t tokens, int64_t rank, int64_t rotary,
                  cudaStream_t stream) {
    split(x, latent, rotated, tokens, rank, rotary, false, "latent_split", stream);
}

void latent_split_bwd(const void* d_latent, const void* d_rotated, void* dx, int64_t tokens, int64_t rank, int64_t rotary,
                      cudaStream_t stream) {
    split(dx, const_cast<void*>(d_latent), const_cast<void*>(d_rotated), tokens, rank, rotary, true,
          "latent_split_bwd", stream);
}

void latent_qkv(const void* q, const void* kv, const void* rotated, void* qkv, int64_t tokens, int64_t heads, int64_t nope,
                int64_t rotary, int64_t v_dim, bool interleaved, cudaStream_t stream) {
    constexpr auto op = "latent_qkv";
    check_heads(tokens, heads, nope, rotary, v_dim, op);
    for (const void* pointer : {q, kv, rotated, static_cast<const void*>(qkv)}) {
        check_pointer(pointer, op, "each operand", 16);
    }
    const int64_t words = tokens * 3 * heads * (nope + rotary) / width;
    qkv_kernel<<<blocks_of(words, op), threads, 0, stream>>>(
        static_cast<const T*>(q), static_cast<const T*>(kv), static_cast<const T*>(rotated), static_cast<T*>(qkv), words,
        to_int(heads, op, "heads"), to_int(nope, op, "nope"), static_cast<int>(rotary), static_cast<int>(v_dim),
        interleaved);
    check_launch(op);
}

void latent_qkv_bwd(const void* dqkv, void* dq, void* dkv, void* d_rotated, int64_t tokens, int64_t heads, int64_t nope,
                    int64_t rotary, int64_t v_dim, bool interleaved, cudaStream_t stream) {
    constexpr auto op = "latent_qkv_bwd";
    check_heads(tokens, heads, nope, rotary, v_dim, op);
    for (const void* pointer : {dqkv, static_cast<const void*>(dq), static_cast<const void*>(dkv),
                                static_cast<const void*>(d_rotated)}) {
        check_pointer(pointer, op, "each operand", 16);
    }
    const int64_t words = tokens * (heads * (2 * nope + rotary + v_dim) + rotary) / width;
    qkv_bwd_kernel<<<blocks_of(words, op), threads, 0, stream>>>(
        static_cast<const T*>(dqkv), static_cast<T*>(dq), static_cast<T*>(dkv), static_cast<T*>(d_rotated), words,
        to_int(heads, op, "heads"), to_int(nope, op, "nope"), static_cast<int>(rotary), static_cast<int>(v_dim),
        interleaved);
    check_launch(op);
}

void latent_values(const void* y, void* out, int64_t tokens, int64_t heads, int64_t from, int64_t to,
                   cudaStream_t stream) {
    constexpr auto op = "latent_values";
    check_positive(tokens, op, "tokens");
    check_positive(heads, op, "heads");
    check_multiple(from, width, op, "elements of a head");
    check_multiple(to, width, op, "elements of a head of the output");
    check_pointer(y, op, "y", 16);
    check_pointer(out, op, "the output", 16);
    const int64_t words = tokens * heads * to / width;
    values_kernel<<<blocks_of(words, op), threads, 0, stream>>>(static_cast<const T*>(y), static_cast<T*>(out), words,
                                                                   to_int(from, op, "from"), to_int(to, op, "to"));
    check_launch(op);
}

}  // namespace surogate
