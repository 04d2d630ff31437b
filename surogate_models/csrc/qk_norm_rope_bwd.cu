// qk_norm_rope_bwd: rotation of dy by the opposite angles, then the backward of the norm, which is recomputed from qkv.
//
//   d[i] = dy[i] cos + dy[i + D/2] sin,  d[i + D/2] = dy[i + D/2] cos - dy[i] sin
//   dx = rstd * (g - n * mean(g * n)), g = d * (w + offset), n = x * rstd;   dw = sum over tokens and heads of d * n
//
// qk_norm_rope_dgrad: dx alone.
//
//   dy, qkv, d_qkv       [tokens, (H + 2G) D], columns [q; k; v], fp32 or bf16; D even, 2 to 256. The v columns are
//                        copied from dy to d_qkv. d_qkv may be the same buffer as dy; then they are not touched.
//   q_norm, k_norm, positions, inv_freq: as in qk_norm_rope.cu, which also defines cos and sin
//   d_q_norm, d_k_norm   [D] fp32 or bf16; written, or accumulated into (+=, fp32 only)
//   partials             fp32 workspace, [chunks of q and k, partial_blocks, D]: a chunk is max(1, 2048 / D) heads, the
//                        last one of q and of k may have fewer. partial_blocks determines the order of the sums, so the
//                        caller must derive it from shapes alone. 512 blocks fill the largest GPUs.
//
// Arithmetic is fp32, with accurate sincosf; each output is rounded once. Accesses are as in qk_norm_rope.cu.
//
// Grid: rope_heads.cuh. With dw, at most partial_blocks blocks per chunk, in a grid-stride loop over tokens. dw is summed
// in registers per lane, then over the groups of a block, then over the blocks by a second kernel, always in the same
// order.
//
// Bytes moved per element in bf16: 6 of q and k; 4 of v, or none in place. 4,096 tokens of Qwen3-8B (H 32, G 8, D 128):
// 125.8 MB in place, 30 us at 4.26 TB/s. An H200 takes 36 us, or 47 us with dw; at 32,768 tokens it reaches 94 % of
// bandwidth, or 84 % with dw.
#include <cuda_bf16.h>

#include <cstdint>

#include "qk_norm_rope.h"
#include "rope_heads.cuh"

namespace surogate {
namespace {

// Heads `base`, `base` + slots, ... of a chunk: `at_once` per group, which are loaded together.
template <class T, int N, int P, int at_once>
struct Batch {
    Head<T, N, P> x[at_once], d[at_once];

    __device__ __forceinline__ void load(const T* qkv, const T* dy, int base, int count, int place,
                                         const RopeShape& s) {
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const int head = base + (k * 32 >> s.group_bits);
            x[k].load(qkv + head * s.head_dim, place, s, head < count);
            d[k].load(dy + head * s.head_dim, place, s, head < count);
        }
    }
};

// No __restrict__ on dy and d_qkv, which may be the same buffer: a lane reads its elements of a head before it writes
// them.
template <class T, int N, int P, bool with_dw>
__global__ void __launch_bounds__(rope_threads, with_dw ? 4 : 8)
    backward_kernel(const T* dy, const T* __restrict__ qkv, const T* __restrict__ q_norm, const T* __restrict__ k_norm,
                    const int32_t* __restrict__ positions, const float* __restrict__ inv_freq, T* d_qkv,
                    float* __restrict__ partials, RopeShape s) {
    constexpr int E = N * P;
    constexpr int at_once = with_dw ? 2 : 1;  // with dw, registers allow fewer warps
    __shared__ Pairs angles[rope_warps], weight;
    __shared__ float sums[with_dw ? rope_threads * 2 * E : 1];  // [groups of the block, D]
    const int warp = threadIdx.x / 32;
    const int64_t first_token = static_cast<int64_t>(blockIdx.x) * rope_warps + warp;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * rope_warps;
    const int64_t row_size = s.row_size();
    const Chunk chunk(s);
    if (chunk.is_values) {
        for (int64_t token = first_token; token < s.tokens; token += stride) {
            copy_values<T, N>(dy + token * row_size, d_qkv + token * row_size, chunk, s);
        }
        return;
    }
    const int place = threadIdx.x & (s.group() - 1);
    const int slot = threadIdx.x % 32 >> s.group_bits;
    const float per_element = 1.0f / static_cast<float>(s.head_dim);
    const int64_t first_element = static_cast<int64_t>(chunk.first) * s.head_dim;
    Batch<T, N, P, at_once> batch;
    batch.load(qkv + first_token * row_size + first_element, dy + first_token * row_size + first_element, slot,
               first_token < s.tokens ? chunk.heads : 0, place, s);
    load_weight<T, N, P>(weight, chunk.is_queries ? q_norm : k_norm, s);
    float dwa[E] = {}, dwb[E] = {};
    for (int64_t token = first_token; token < s.tokens; token += stride) {
        const int64_t first = token * row_size + first_element;
        if (token > first_token) {
            batch.load(qkv + first, dy + first, slot, chunk.heads, place, s);
        }
        compute_angles<N, P>(angles[warp], positions[token], inv_freq, s);
        // All groups run the same number of iterations, because the lanes of a warp shuffle together.
        for (int base = 0; base < chunk.heads; base += at_once * 32 >> s.group_bits) {
            if (base > 0) {
                batch.load(qkv + first, dy + first, base + slot, chunk.heads, place, s);
            }
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
                if (base + (k * 32 >> s.group_bits) >= chunk.heads) {
                    break;
                }
                const int head = base + slot + (k * 32 >> s.group_bits);
                Head<T, N, P>&x = batch.x[k], &d = batch.d[k];
                float a[E], b[E], da[E], db[E];
                d.to_float(da, db);
                {
                    float c[E], z[E];
                    angles[warp].load<N, P>(place, s, c, z);
#pragma unroll
                    for (int i = 0; i < E; ++i) {
                        const float turned = da[i] * c[i] + db[i] * z[i];
                        db[i] = db[i] * c[i] - da[i] * z[i];
                        da[i] = turned;
                    }
                }
                float wa[E], wb[E];
                weight.load<N, P>(place, s, wa, wb);
                x.to_float(a, b);
                float squares = 0, products = 0;  // sums of x^2 and of g x
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    squares += a[i] * a[i] + b[i] * b[i];
                    const float ga = da[i] * wa[i], gb = db[i] * wb[i];
                    products += ga * a[i] + gb * b[i];
                    if constexpr (!with_dw) {
                        da[i] = ga;
                        db[i] = gb;
                    }
                }
                // Without a head, elements are 0 and rstd could be infinite: 0 keeps NaN out of dw.
                const float root = __frsqrt_rn(group_sum(squares, s) * per_element + s.eps);
                const float rstd = head < chunk.heads ? root : 0.0f;
                const float mean = group_sum(products, s) * rstd * per_element;  // of g n
                const float slope = rstd * rstd * mean;
                x.to_float(a, b);
                if constexpr (with_dw) {
                    weight.load<N, P>(place, s, wa, wb);
#pragma unroll
                    for (int i = 0; i < E; ++i) {
                        dwa[i] += da[i] * (a[i] * rstd);
                        dwb[i] += db[i] * (b[i] * rstd);
                        da[i] *= wa[i];
                        db[i] *= wb[i];
                    }
                }
#pragma unroll
                for (int i = 0; i < E; ++i) {
                    da[i] = da[i] * rstd - a[i] * slope;
                    db[i] = db[i] * rstd - b[i] * slope;
                }
                d.from_float(da, db);
                d.store(d_qkv + first + head * s.head_dim, place, s, head < chunk.heads);
                __syncwarp();  // the floats in shared memory are read again for the next head: fewer registers
            }
        }
    }

    if constexpr (with_dw) {
        const int half = s.head_dim / 2;
        const int groups = rope_threads >> s.group_bits;
#pragma unroll
        for (int i = 0; i < E; ++i) {
            const int element = run_start<N>(i / N, place, s) + i % N;
            if (element < half) {
                float* sum = sums + (threadIdx.x >> s.group_bits) * s.head_dim;
                sum[s.first_of(element)] = dwa[i];
                sum[s.second_of(element)] = dwb[i];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < s.head_dim; i += rope_threads) {
            float sum = 0;
            for (int g = 0; g < groups; ++g) {
                sum += sums[g * s.head_dim + i];
            }
            partials[(static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * s.head_dim + i] = sum;
        }
    }
}

// Destination of the gradient of a norm weight.
struct Destination {
    void* address;
    int dtype;
    bool accumulate;
};

// Grid: (ceil(D / 32), 2), blockIdx.y 0 for q_norm and 1 for k_norm. A block has 32 columns x 32 rows of threads. Thread
// row r sums the rows r, r + 32, ... of the partial sums; the first row of threads then sums over r.
__global__ void __launch_bounds__(1024)
    sum_partials_kernel(const float* __restrict__ partials, Destination d_q_norm, Destination d_k_norm,
                        int64_t query_rows, int64_t rows, int head_dim) {
    __shared__ float sums[32][33];
    const int column = blockIdx.x * 32 + threadIdx.x;
    const int64_t end = blockIdx.y == 0 ? query_rows : rows;
    float sum = 0;
    if (column < head_dim) {
#pragma unroll 8
        for (int64_t row = (blockIdx.y == 0 ? 0 : query_rows) + threadIdx.y; row < end; row += 32) {
            sum += partials[row * head_dim + column];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < head_dim) {
        sum = 0;
        for (int row = 0; row < 32; ++row) {
            sum += sums[row][threadIdx.x];
        }
        const Destination out = blockIdx.y == 0 ? d_q_norm : d_k_norm;
        if (out.dtype == BF16) {
            static_cast<__nv_bfloat16*>(out.address)[column] = __float2bfloat16_rn(sum);
        } else {
            float* address = static_cast<float*>(out.address) + column;
            *address = out.accumulate ? *address + sum : sum;
        }
    }
}

struct Buffers {
    const void *dy, *qkv, *q_norm, *k_norm, *positions, *inv_freq;
    void *d_qkv, *partials;
};

// Without partials, computes dx alone. Returns the grid.
template <class T>
dim3 launch(const char* op, const Buffers& b, int64_t partial_blocks, RopeShape s, cudaStream_t stream) {
    constexpr int n = Vec<T>::size;
    const bool with_dw = b.partials != nullptr;
    const bool vectors = choose_vectors<T>(s, {b.dy, b.qkv, b.q_norm, b.k_norm, b.d_qkv});
    const auto kernel = vectors ? (with_dw ? backward_kernel<T, n, 1, true> : backward_kernel<T, n, 1, false>)
                                : (with_dw ? backward_kernel<T, 1, 4, true> : backward_kernel<T, 1, 4, false>);
    const dim3 grid = rope_grid(s, b.dy == b.d_qkv, op, partial_blocks);
    kernel<<<grid, rope_threads, 0, stream>>>(
        static_cast<const T*>(b.dy), static_cast<const T*>(b.qkv), static_cast<const T*>(b.q_norm),
        static_cast<const T*>(b.k_norm), static_cast<const int32_t*>(b.positions),
        static_cast<const float*>(b.inv_freq), static_cast<T*>(b.d_qkv), static_cast<float*>(b.partials), s);
    check_launch(op);
    return grid;
}

void check_buffers(const char* op, const Buffers& b, int dtype) {
    const uintptr_t element = bytes_of(dtype);
    check_pointer(b.dy, op, "dy", element);
    check_pointer(b.qkv, op, "qkv", element);
    check_pointer(b.q_norm, op, "q_norm", element);
    check_pointer(b.k_norm, op, "k_norm", element);
    check_pointer(b.positions, op, "positions", 4);
    check_pointer(b.inv_freq, op, "inv_freq", 4);
    check_pointer(b.d_qkv, op, "d_qkv", element);
}

void check_destination(const char* op, const char* argument, const Destination& out) {
    SUROGATE_REQUIRE(out.dtype == FP32 || out.dtype == BF16, op,
                     std::string(argument) + " must be fp32 or bf16, got " + name_of(out.dtype));
    SUROGATE_REQUIRE(out.dtype == FP32 || !out.accumulate, op,
                     std::string(argument) + " is bf16, which is only written, never added to");
    check_pointer(out.address, op, argument, bytes_of(out.dtype));
}

}  // namespace

void qk_norm_rope_bwd(const void* dy, const void* qkv, const void* q_norm, const void* k_norm, const void* positions,
                      const void* inv_freq, void* d_qkv, void* d_q_norm, void* d_k_norm, void* partials,
                      int64_t partial_blocks, int64_t tokens, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                      int64_t rotary_dim, double eps, double offset, double attention_factor, bool accumulate_q,
                      bool accumulate_k, int dtype, int d_q_norm_dtype, int d_k_norm_dtype, cudaStream_t stream) {
    constexpr const char* op = "qk_norm_rope_bwd";
    const RopeShape s =
        checked_norm_shape(op, tokens, n_heads, n_kv_heads, head_dim, rotary_dim, eps, offset, attention_factor, dtype);
    const Buffers buffers{dy, qkv, q_norm, k_norm, positions, inv_freq, d_qkv, partials};
    const Destination q_out{d_q_norm, d_q_norm_dtype, accumulate_q};
    const Destination k_out{d_k_norm, d_k_norm_dtype, accumulate_k};
    check_buffers(op, buffers, dtype);
    check_destination(op, "d_q_norm", q_out);
    check_destination(op, "d_k_norm", k_out);
    check_pointer(partials, op, "partials", 4);
    check_positive(partial_blocks, op, "partial_blocks");
    const auto launch_typed = dtype == FP32 ? launch<float> : launch<__nv_bfloat16>;
    const int64_t blocks = launch_typed(op, buffers, partial_blocks, s, stream).x;
    const dim3 grid(static_cast<unsigned>(ceil_div(head_dim, 32)), 2);
    const int64_t query_rows = blocks * s.query_chunks;
    sum_partials_kernel<<<grid, dim3(32, 32), 0, stream>>>(static_cast<const float*>(partials), q_out, k_out,
                                                           query_rows, query_rows + blocks * s.key_chunks,
                                                           s.head_dim);
    check_launch(op);
}

void qk_norm_rope_dgrad(const void* dy, const void* qkv, const void* q_norm, const void* k_norm, const void* positions,
                        const void* inv_freq, void* d_qkv, int64_t tokens, int64_t n_heads, int64_t n_kv_heads,
                        int64_t head_dim, int64_t rotary_dim, double eps, double offset, double attention_factor, int dtype,
                        cudaStream_t stream) {
    constexpr const char* op = "qk_norm_rope_dgrad";
    const RopeShape s =
        checked_norm_shape(op, tokens, n_heads, n_kv_heads, head_dim, rotary_dim, eps, offset, attention_factor, dtype);
    const Buffers buffers{dy, qkv, q_norm, k_norm, positions, inv_freq, d_qkv, nullptr};
    check_buffers(op, buffers, dtype);
    const auto launch_typed = dtype == FP32 ? launch<float> : launch<__nv_bfloat16>;
    launch_typed(op, buffers, 0, s, stream);
}

}  // namespace surogate
