// qk_norm_rope: RMS norm of every query and key head, then RoPE in the half layout. The v heads are copied.
//
//   n = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps), u = n * w     for each head of D elements
//   y[i] = u[i] cos - u[i + D/2] sin,  y[i + D/2] = u[i + D/2] cos + u[i] sin,   angle = position * inv_freq[i]
//
// cos and sin denote attention_factor times the cosine and sine of the angle.
//
// qk_norm_rope_bwd: rotation by the opposite angles, then the backward of the norm, which is recomputed from qkv.
//
//   d[i] = dy[i] cos + dy[i + D/2] sin,  d[i + D/2] = dy[i + D/2] cos - dy[i] sin
//   dx = rstd * (g - n * mean(g * n)), g = d * w;   dw = sum over tokens and heads of d * n
//
// rope: without the norm, u = x. rope_bwd: rope with the opposite angles, applied to dy.
//
//   qkv, out, dy, d_qkv  [tokens, (H + 2G) D], columns [q; k; v], fp32 or bf16; D even, 2 to 256
//   q_norm, k_norm       [D] in the dtype of qkv
//   positions            [tokens] int32
//   inv_freq             [D / 2] fp32, theta^(-2i/D), optionally scaled. The caller computes it by the operations of
//                        transformers, because it must have the same bits.
//   d_q_norm, d_k_norm   [D] fp32 or bf16; written, or accumulated into (+=, fp32 only)
//   partials             [2, partial_blocks, D] fp32 workspace. partial_blocks determines the order of the sums, so
//                        the caller must derive it from shapes alone. 512 blocks fill the largest GPUs.
//
// Arithmetic is fp32, with accurate sincosf; each output is rounded once. Accesses are 16 bytes wide if pointers are
// aligned to 16 bytes and D/2 is a multiple of 8 (bf16) or 4 (fp32), otherwise one element wide.
//
// Grid: a block processes tiles of 256 / (D/2) tokens. First each thread computes one angle, which all heads share.
// Then each group of lanes (a power of two) processes one (token, head) at a time. A lane holds consecutive elements of
// the first half and the corresponding elements of the second half, so that it holds both elements of a pair. In the
// backward kernel, half of the blocks process the query heads and half the key and value heads, with a grid-stride loop
// over tiles. dw is summed in registers per lane, then over the groups of a block, then over the blocks by a second
// kernel, always in the same order.
//
// Bytes moved: 4 per element of qkv in the forward kernels and rope_bwd; 6 per element of q and k and 4 per element of
// v in qk_norm_rope_bwd (bf16; twice that in fp32). Expected: 80-85 % of bandwidth.
#include <cuda_bf16.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "qk_norm_rope.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/reduce.cuh"
#include "surogate/vec.cuh"

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr int max_head_dim = 256;
constexpr int tile_angles = 256;  // upper bound of tile * D/2

struct Shape {
    int64_t tokens;
    int heads;     // H
    int kv_heads;  // G
    int head_dim;  // D
    int tile;      // tokens per tile
    int group;     // lanes per head
    float eps;
    float cos_scale;  // factors of the cosines and sines
    float sin_scale;
};

// A lane holds P runs of N consecutive elements of each half of a head: lane l holds the runs l, l + group, ...
// Elements beyond D/2 are loaded as 0 and not stored.
template <int N>
__device__ __forceinline__ int run_start(int run, int lane, const Shape& s) {
    return (lane + run * s.group) * N;
}

template <class T, int N, int P>
__device__ __forceinline__ void load_halves(const T* head, int lane, const Shape& s, float (&a)[N * P],
                                            float (&b)[N * P]) {
    using V = Vec<T, N>;
    const int half = s.head_dim / 2;
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int first = run_start<N>(p, lane, s);
        if (first < half) {
            const V va = V::load(head + first);
            const V vb = V::load(head + half + first);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                a[p * N + i] = to_float(va[i]);
                b[p * N + i] = to_float(vb[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                a[p * N + i] = b[p * N + i] = 0.0f;
            }
        }
    }
}

template <class T, int N, int P>
__device__ __forceinline__ void store_halves(T* head, int lane, const Shape& s, const float (&a)[N * P],
                                             const float (&b)[N * P]) {
    using V = Vec<T, N>;
    const int half = s.head_dim / 2;
#pragma unroll
    for (int p = 0; p < P; ++p) {
        const int first = run_start<N>(p, lane, s);
        if (first < half) {
            V va, vb;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                va[i] = from_float<T>(a[p * N + i]);
                vb[i] = from_float<T>(b[p * N + i]);
            }
            va.store(head + first);
            vb.store(head + half + first);
        }
    }
}

// Cosines and sines of all pairs of the tokens in a tile, [tile, D/2] each, in shared memory.
struct Angles {
    alignas(16) float cosines[tile_angles];
    alignas(16) float sines[tile_angles];

    __device__ __forceinline__ void compute(const int32_t* positions, const float* inv_freq, int64_t first_token,
                                            const Shape& s) {
        const int half = s.head_dim / 2;
        for (int i = threadIdx.x; i < s.tile * half; i += threads) {
            const int64_t token = first_token + i / half;
            if (token < s.tokens) {
                const float angle = __fmul_rn(static_cast<float>(positions[token]), inv_freq[i % half]);
                float sine, cosine;
                sincosf(angle, &sine, &cosine);
                sines[i] = sine * s.sin_scale;
                cosines[i] = cosine * s.cos_scale;
            }
        }
    }

    // Loads the values for the pairs of a lane. Beyond D/2 the angle is 0.
    template <int N, int P>
    __device__ __forceinline__ void load(int row, int lane, const Shape& s, float (&c)[N * P],
                                         float (&z)[N * P]) const {
        constexpr int M = N < 4 ? N : 4;
        const int half = s.head_dim / 2;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int first = run_start<N>(p, lane, s);
#pragma unroll
            for (int i = 0; i < N; i += M) {
                Vec<float, M> vc, vz;
                if (first < half) {
                    vc = Vec<float, M>::load(cosines + row * half + first + i);
                    vz = Vec<float, M>::load(sines + row * half + first + i);
                }
#pragma unroll
                for (int k = 0; k < M; ++k) {
                    c[p * N + i + k] = first < half ? vc[k] : 1.0f;
                    z[p * N + i + k] = first < half ? vz[k] : 0.0f;
                }
            }
        }
    }
};

// Sum over the lanes of a group, in the same order on every lane. All lanes of the warp must call it.
__device__ __forceinline__ float group_sum(float x, const Shape& s) {
    for (int offset = s.group / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(full_warp, x, offset);
    }
    return x;
}

__device__ __forceinline__ float reciprocal_std(float sum_of_squares, const Shape& s) {
    return __frsqrt_rn(sum_of_squares / static_cast<float>(s.head_dim) + s.eps);
}

// q_norm and k_norm are read only if `with_norm`.
template <class T, int N, int P, bool with_norm>
__global__ void __launch_bounds__(threads)
    forward_kernel(const T* __restrict__ qkv, const T* __restrict__ q_norm, const T* __restrict__ k_norm,
                   const int32_t* __restrict__ positions, const float* __restrict__ inv_freq, T* __restrict__ out,
                   Shape s) {
    constexpr int E = N * P;
    __shared__ Angles angles;
    const int64_t first_token = static_cast<int64_t>(blockIdx.x) * s.tile;
    angles.compute(positions, inv_freq, first_token, s);
    __syncthreads();

    const int total = s.heads + 2 * s.kv_heads;
    const int units = static_cast<int>(min(static_cast<int64_t>(s.tile), s.tokens - first_token)) * total;
    const int lane = threadIdx.x % s.group;
    // All groups run the same number of iterations, because the lanes of a warp shuffle together. A group without a
    // unit left loads the first unit and stores nothing.
    for (int base = 0; base < units; base += threads / s.group) {
        const int unit = base + threadIdx.x / s.group;
        const bool active = unit < units;
        const int row = active ? unit / total : 0;
        const int head = active ? unit % total : 0;
        const int64_t offset = ((first_token + row) * total + head) * s.head_dim;
        float a[E], b[E];
        load_halves<T, N, P>(qkv + offset, lane, s, a, b);
        float rstd = 0;
        if constexpr (with_norm) {
            float squares = 0;
#pragma unroll
            for (int i = 0; i < E; ++i) {
                squares += a[i] * a[i] + b[i] * b[i];
            }
            rstd = reciprocal_std(group_sum(squares, s), s);
        }
        if (head < s.heads + s.kv_heads) {
            float wa[E], wb[E], c[E], z[E];
            if constexpr (with_norm) {
                load_halves<T, N, P>(head < s.heads ? q_norm : k_norm, lane, s, wa, wb);
            }
            angles.load<N, P>(row, lane, s, c, z);
#pragma unroll
            for (int i = 0; i < E; ++i) {
                const float ua = with_norm ? a[i] * rstd * wa[i] : a[i];
                const float ub = with_norm ? b[i] * rstd * wb[i] : b[i];
                a[i] = ua * c[i] - ub * z[i];
                b[i] = ub * c[i] + ua * z[i];
            }
        }
        if (active) {
            store_halves<T, N, P>(out + offset, lane, s, a, b);
        }
    }
}

// Grid: (partial_blocks, 2). blockIdx.y is 0 for the query heads and 1 for the key and value heads.
template <class T, int N, int P>
__global__ void __launch_bounds__(threads)
    backward_kernel(const T* __restrict__ dy, const T* __restrict__ qkv, const T* __restrict__ q_norm,
                    const T* __restrict__ k_norm, const int32_t* __restrict__ positions,
                    const float* __restrict__ inv_freq, T* __restrict__ d_qkv, float* __restrict__ partials, Shape s) {
    constexpr int E = N * P;
    __shared__ Angles angles;
    __shared__ float sums[threads * 2 * E];  // [groups, D]
    const int half = s.head_dim / 2;
    const int lane = threadIdx.x % s.group;
    const int group = threadIdx.x / s.group;
    const int groups = threads / s.group;
    const bool queries = blockIdx.y == 0;
    const int first_head = queries ? 0 : s.heads;
    const int heads = queries ? s.heads : 2 * s.kv_heads;  // of this block; the first `normed` have a norm
    const int normed = queries ? s.heads : s.kv_heads;
    const int64_t row_size = static_cast<int64_t>(s.heads + 2 * s.kv_heads) * s.head_dim;

    float wa[E], wb[E], dwa[E] = {}, dwb[E] = {};
    load_halves<T, N, P>(queries ? q_norm : k_norm, lane, s, wa, wb);
    const int64_t stride = static_cast<int64_t>(gridDim.x) * s.tile;
    for (int64_t first_token = static_cast<int64_t>(blockIdx.x) * s.tile; first_token < s.tokens;
         first_token += stride) {
        __syncthreads();  // all threads have read the angles of the previous tile
        angles.compute(positions, inv_freq, first_token, s);
        __syncthreads();
        const int units = static_cast<int>(min(static_cast<int64_t>(s.tile), s.tokens - first_token)) * heads;
        for (int base = 0; base < units; base += groups) {
            const int unit = base + group;
            const bool active = unit < units;
            const int row = active ? unit / heads : 0;
            const int head = active ? unit % heads : 0;
            const int64_t offset = (first_token + row) * row_size + (first_head + head) * s.head_dim;
            const bool has_norm = head < normed;
            float a[E] = {}, b[E] = {}, da[E], db[E];
            if (has_norm) {
                load_halves<T, N, P>(qkv + offset, lane, s, a, b);
            }
            load_halves<T, N, P>(dy + offset, lane, s, da, db);
            float squares = 0, products = 0;  // sums of x^2 and of g x
            if (has_norm) {
                float c[E], z[E];
                angles.load<N, P>(row, lane, s, c, z);
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    const float turned = da[i] * c[i] + db[i] * z[i];
                    db[i] = db[i] * c[i] - da[i] * z[i];
                    da[i] = turned;
                    squares += a[i] * a[i] + b[i] * b[i];
                    products += da[i] * wa[i] * a[i] + db[i] * wb[i] * b[i];
                }
            }
            const float rstd = reciprocal_std(group_sum(squares, s), s);
            const float mean = group_sum(products, s) * rstd / static_cast<float>(s.head_dim);  // mean of g n
            if (!active) {
                continue;
            }
            if (has_norm) {
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    const float na = a[i] * rstd;
                    const float nb = b[i] * rstd;
                    dwa[i] += da[i] * na;
                    dwb[i] += db[i] * nb;
                    da[i] = (da[i] * wa[i] - na * mean) * rstd;
                    db[i] = (db[i] * wb[i] - nb * mean) * rstd;
                }
            }
            store_halves<T, N, P>(d_qkv + offset, lane, s, da, db);
        }
    }

#pragma unroll
    for (int i = 0; i < E; ++i) {
        const int element = run_start<N>(i / N, lane, s) + i % N;
        if (element < half) {
            sums[group * s.head_dim + element] = dwa[i];
            sums[group * s.head_dim + half + element] = dwb[i];
        }
    }
    __syncthreads();
    if (threadIdx.x < s.head_dim) {
        float sum = 0;
        for (int g = 0; g < groups; ++g) {
            sum += sums[g * s.head_dim + threadIdx.x];
        }
        partials[(static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * s.head_dim + threadIdx.x] = sum;
    }
}

// Destination of the gradient of a norm weight.
struct Target {
    void* address;
    int dtype;
    bool accumulate;
};

// Grid: (ceil(D / 32), 2). A block has 32 columns x 32 rows of threads. Thread row r sums the rows r, r + 32, ... of
// the partial sums; the first row of threads then sums over r.
__global__ void __launch_bounds__(1024)
    sum_partials_kernel(const float* __restrict__ partials, Target d_q_norm, Target d_k_norm, int64_t blocks,
                        int head_dim) {
    __shared__ float sums[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (column < head_dim) {
        for (int64_t row = threadIdx.y; row < blocks; row += 32) {
            sum += partials[(blockIdx.y * blocks + row) * head_dim + column];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < head_dim) {
        sum = 0;
        for (int row = 0; row < 32; ++row) {
            sum += sums[row][threadIdx.x];
        }
        const Target target = blockIdx.y == 0 ? d_q_norm : d_k_norm;
        if (target.dtype == BF16) {
            static_cast<__nv_bfloat16*>(target.address)[column] = __float2bfloat16_rn(sum);
        } else {
            float* address = static_cast<float*>(target.address) + column;
            *address = target.accumulate ? *address + sum : sum;
        }
    }
}

// ------------------------------------------------------------------------------------------------------------ host

Shape checked_shape(const char* op, int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, double eps,
                    double attention_factor, int dtype) {
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op,
                     std::string("dtype must be fp32 or bf16, got ") + name_of(dtype));
    check_positive(tokens, op, "tokens");
    check_positive(n_heads, op, "n_heads");
    check_positive(n_kv_heads, op, "n_kv_heads");
    SUROGATE_REQUIRE(n_heads <= 65536 && n_kv_heads <= 65536, op,
                     "n_heads and n_kv_heads must be at most 65536, got " + std::to_string(n_heads) + " and " +
                         std::to_string(n_kv_heads));
    SUROGATE_REQUIRE(head_dim >= 2 && head_dim <= max_head_dim && head_dim % 2 == 0, op,
                     "head_dim must be even and from 2 to 256, got " + std::to_string(head_dim));
    SUROGATE_REQUIRE(eps >= 0, op, "eps must not be negative, got " + std::to_string(eps));
    SUROGATE_REQUIRE(attention_factor > 0, op,
                     "attention_factor must be positive, got " + std::to_string(attention_factor));
    return {tokens,
            static_cast<int>(n_heads),
            static_cast<int>(n_kv_heads),
            static_cast<int>(head_dim),
            static_cast<int>(tile_angles / (head_dim / 2)),
            32,
            static_cast<float>(eps),
            static_cast<float>(attention_factor),
            static_cast<float>(attention_factor)};
}

// Whether 16-byte accesses are possible: all buffers are aligned and D/2 is a multiple of the vector size.
template <class T>
bool use_vectors(const Shape& s, std::initializer_list<const void*> buffers) {
    bool aligned = true;
    for (const void* buffer : buffers) {
        aligned = aligned && is_aligned(buffer, 16);
    }
    return aligned && s.head_dim / 2 % Vec<T>::size == 0;
}

// Number of lanes per head: the smallest power of two that holds D/2 elements in runs of n.
int group_of(const Shape& s, int n) {
    int group = 1;
    while (group * n < s.head_dim / 2) {
        group *= 2;
    }
    return group;
}

template <class T, bool with_norm>
void launch_forward(const char* op, const void* qkv, const void* q_norm, const void* k_norm, const void* positions,
                    const void* inv_freq, void* out, Shape s, cudaStream_t stream) {
    constexpr int N = Vec<T>::size;
    const bool vectors = use_vectors<T>(s, {qkv, q_norm, k_norm, out});
    s.group = vectors ? group_of(s, N) : 32;
    const auto kernel = vectors ? forward_kernel<T, N, 1, with_norm> : forward_kernel<T, 1, 4, with_norm>;
    kernel<<<to_int(ceil_div(s.tokens, s.tile), op, "tokens"), threads, 0, stream>>>(
        static_cast<const T*>(qkv), static_cast<const T*>(q_norm), static_cast<const T*>(k_norm),
        static_cast<const int32_t*>(positions), static_cast<const float*>(inv_freq), static_cast<T*>(out), s);
}

template <class T>
void launch_backward(const void* dy, const void* qkv, const void* q_norm, const void* k_norm, const void* positions,
                     const void* inv_freq, void* d_qkv, void* partials, int blocks, Shape s, cudaStream_t stream) {
    constexpr int N = Vec<T>::size;
    const bool vectors = use_vectors<T>(s, {dy, qkv, q_norm, k_norm, d_qkv});
    s.group = vectors ? group_of(s, N) : 32;
    const auto kernel = vectors ? backward_kernel<T, N, 1> : backward_kernel<T, 1, 4>;
    kernel<<<dim3(blocks, 2), threads, 0, stream>>>(
        static_cast<const T*>(dy), static_cast<const T*>(qkv), static_cast<const T*>(q_norm),
        static_cast<const T*>(k_norm), static_cast<const int32_t*>(positions), static_cast<const float*>(inv_freq),
        static_cast<T*>(d_qkv), static_cast<float*>(partials), s);
}

void check_target(const char* op, const char* argument, const Target& target) {
    SUROGATE_REQUIRE(target.dtype == FP32 || target.dtype == BF16, op,
                     std::string(argument) + " must be fp32 or bf16, got " + name_of(target.dtype));
    SUROGATE_REQUIRE(target.dtype == FP32 || !target.accumulate, op,
                     std::string(argument) + " is bf16, which is only written, never added to");
    check_pointer(target.address, op, argument, bytes_of(target.dtype));
}

void turn(const char* op, const void* in, const void* positions, const void* inv_freq, void* out, const Shape& s,
          int dtype, cudaStream_t stream) {
    check_pointer(in, op, "in", bytes_of(dtype));
    check_pointer(positions, op, "positions", 4);
    check_pointer(inv_freq, op, "inv_freq", 4);
    check_pointer(out, op, "out", bytes_of(dtype));
    const auto launch = dtype == FP32 ? launch_forward<float, false> : launch_forward<__nv_bfloat16, false>;
    launch(op, in, nullptr, nullptr, positions, inv_freq, out, s, stream);
    check_launch(op);
}

}  // namespace

void rope(const void* qkv, const void* positions, const void* inv_freq, void* out, int64_t tokens, int64_t n_heads,
          int64_t n_kv_heads, int64_t head_dim, double attention_factor, int dtype, cudaStream_t stream) {
    const Shape s = checked_shape("rope", tokens, n_heads, n_kv_heads, head_dim, 0, attention_factor, dtype);
    turn("rope", qkv, positions, inv_freq, out, s, dtype, stream);
}

void rope_bwd(const void* dy, const void* positions, const void* inv_freq, void* d_qkv, int64_t tokens, int64_t n_heads,
              int64_t n_kv_heads, int64_t head_dim, double attention_factor, int dtype, cudaStream_t stream) {
    Shape s = checked_shape("rope_bwd", tokens, n_heads, n_kv_heads, head_dim, 0, attention_factor, dtype);
    s.sin_scale = -s.sin_scale;
    turn("rope_bwd", dy, positions, inv_freq, d_qkv, s, dtype, stream);
}

void qk_norm_rope(const void* qkv, const void* q_norm, const void* k_norm, const void* positions, const void* inv_freq,
                  void* out, int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, double eps,
                  double attention_factor, int dtype, cudaStream_t stream) {
    constexpr const char* op = "qk_norm_rope";
    const Shape s = checked_shape(op, tokens, n_heads, n_kv_heads, head_dim, eps, attention_factor, dtype);
    const uintptr_t element = bytes_of(dtype);
    check_pointer(qkv, op, "qkv", element);
    check_pointer(q_norm, op, "q_norm", element);
    check_pointer(k_norm, op, "k_norm", element);
    check_pointer(positions, op, "positions", 4);
    check_pointer(inv_freq, op, "inv_freq", 4);
    check_pointer(out, op, "out", element);
    const auto launch = dtype == FP32 ? launch_forward<float, true> : launch_forward<__nv_bfloat16, true>;
    launch(op, qkv, q_norm, k_norm, positions, inv_freq, out, s, stream);
    check_launch(op);
}

void qk_norm_rope_bwd(const void* dy, const void* qkv, const void* q_norm, const void* k_norm, const void* positions,
                      const void* inv_freq, void* d_qkv, void* d_q_norm, void* d_k_norm, void* partials,
                      int64_t partial_blocks, int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                      double eps, double attention_factor, bool accumulate_q, bool accumulate_k, int dtype,
                      int d_q_norm_dtype, int d_k_norm_dtype, cudaStream_t stream) {
    constexpr const char* op = "qk_norm_rope_bwd";
    const Shape s = checked_shape(op, tokens, n_heads, n_kv_heads, head_dim, eps, attention_factor, dtype);
    const Target q_target{d_q_norm, d_q_norm_dtype, accumulate_q};
    const Target k_target{d_k_norm, d_k_norm_dtype, accumulate_k};
    const uintptr_t element = bytes_of(dtype);
    check_pointer(dy, op, "dy", element);
    check_pointer(qkv, op, "qkv", element);
    check_pointer(q_norm, op, "q_norm", element);
    check_pointer(k_norm, op, "k_norm", element);
    check_pointer(positions, op, "positions", 4);
    check_pointer(inv_freq, op, "inv_freq", 4);
    check_pointer(d_qkv, op, "d_qkv", element);
    check_target(op, "d_q_norm", q_target);
    check_target(op, "d_k_norm", k_target);
    check_pointer(partials, op, "partials", 4);
    check_positive(partial_blocks, op, "partial_blocks");
    const int blocks = to_int(partial_blocks, op, "partial_blocks");
    const auto launch = dtype == FP32 ? launch_backward<float> : launch_backward<__nv_bfloat16>;
    launch(dy, qkv, q_norm, k_norm, positions, inv_freq, d_qkv, partials, blocks, s, stream);
    check_launch(op);
    const dim3 grid(static_cast<unsigned>(ceil_div(head_dim, 32)), 2);
    sum_partials_kernel<<<grid, dim3(32, 32), 0, stream>>>(static_cast<const float*>(partials), q_target, k_target,
                                                           partial_blocks, s.head_dim);
    check_launch(op);
}

}  // namespace surogate
