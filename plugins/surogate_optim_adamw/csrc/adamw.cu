// adamw: one step of AdamW (Loshchilov & Hutter 2019) for all params in one launch.
//
//   g = clip_coef * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p *= 1 - lr wd;
//   p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// Arithmetic is fp32 on the unrounded moments. Each operation is rounded separately (no fused multiply-add), in the
// order of `surogate_optim_adamw.reference:adamw`, so results are bit-identical to it. bf16 masters and moments are
// stored with stochastic rounding. Nothing is written if clip_coef is not finite.
//
//   table      [tensors] entries of 9 int64 words, see Entry: grad, master, m and v, each fp32 or bf16; optionally a
//              work copy, fp32 or bf16, which receives the stored master, rounded to nearest. Masters and moments are
//              updated in place. Chunks are numbered consecutively over all tensors; a tensor of `size` elements has
//              ceil(size / chunk_size) chunks.
//   clip_coef, lr  fp32 scalars; step int32 scalar, 1 at the first step; seed int64 scalar; all in device memory
//
// Random bits: Philox with the key `seed` and the counter (index of the eight elements, stream of the value, step). A
// param has three streams: its own and two that differ from it in fixed bits (philox.cuh).
//
// Any size. Pointers are aligned to their element; accesses are 16 bytes wide for tensors whose buffers are all aligned
// to 16 bytes. Grid: one block per chunk; a thread processes eight elements per iteration.
//
// Bytes moved per element: 28 with fp32 throughout, 14 with bf16 throughout. Expected: 85-90 % of bandwidth with fp32
// states. With bf16 throughout, three Philox calls, two exact divisions and a square root take about 110 instructions
// per element, and arithmetic limits the kernel to about half of the bandwidth.
#include <cuda_bf16.h>

#include <cstdint>

#include "adamw.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/octet.cuh"
#include "surogate/philox.cuh"

namespace surogate {
namespace {

constexpr const char* op = "adamw";
constexpr int threads = 256;

// Philox streams of the three values of a param, as in the reference.
constexpr uint32_t master_stream = 0;
constexpr uint32_t m_stream = 0x9E3779B9u;
constexpr uint32_t v_stream = 0x7F4A7C15u;

// Bits of Entry::flags. `surogate_optim_adamw.kernels` sets them.
constexpr uint32_t grad_bf16 = 1;
constexpr uint32_t master_bf16 = 2;
constexpr uint32_t m_bf16 = 4;
constexpr uint32_t v_bf16 = 8;
constexpr uint32_t copy_bf16 = 16;

struct Entry {
    const void* grad;
    void* master;
    void* m;
    void* v;
    void* copy;  // null if the master is the param itself
    int64_t size;
    int64_t first_chunk;
    double weight_decay;
    uint32_t stream;
    uint32_t flags;
};
static_assert(sizeof(Entry) == 9 * sizeof(int64_t));

// Coefficients that are the same for all elements of a tensor. Computed in fp64 and then rounded, as in the reference.
struct Rates {
    float coef, beta1, rest1, beta2, rest2, decay, rate, correction2, epsilon;
};

__device__ Rates rates(float clip_coef, float lr, int step, double weight_decay, double beta1, double beta2,
                       double epsilon) {
    const double rate = lr;
    const double t = step;
    Rates r;
    r.coef = clip_coef;
    r.beta1 = static_cast<float>(beta1);
    r.rest1 = static_cast<float>(1 - beta1);
    r.beta2 = static_cast<float>(beta2);
    r.rest2 = static_cast<float>(1 - beta2);
    r.decay = static_cast<float>(__dsub_rn(1.0, __dmul_rn(rate, weight_decay)));
    r.rate = static_cast<float>(rate / (1 - pow(beta1, t)));
    r.correction2 = static_cast<float>(sqrt(1 - pow(beta2, t)));
    r.epsilon = static_cast<float>(epsilon);
    return r;
}

__device__ __forceinline__ void load(const void* base, bool bf16, int64_t first, float (&x)[octet], int64_t count,
                                     bool whole) {
    if (bf16) {
        load_octet(static_cast<const __nv_bfloat16*>(base) + first, x, count, whole);
    } else {
        load_octet(static_cast<const float*>(base) + first, x, count, whole);
    }
}

__device__ __forceinline__ void store(void* base, bool bf16, int64_t first, const float (&x)[octet], int64_t count,
                                      bool whole) {
    if (bf16) {
        store_octet(static_cast<__nv_bfloat16*>(base) + first, x, count, whole);
    } else {
        store_octet(static_cast<float*>(base) + first, x, count, whole);
    }
}

// Stores a state, with stochastic rounding to bf16. Sets `x` to the stored values.
__device__ __forceinline__ void store_state(void* base, bool bf16, int64_t first, float (&x)[octet], int64_t count,
                                            bool whole, int64_t seed, uint32_t stream, int step) {
    if (bf16) {
        const PhiloxWords random = random_halves(first / octet, seed, stream, step);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            x[i] = __bfloat162float(stochastic_round_bf16(x[i], random.half(i)));
        }
    }
    store(base, bf16, first, x, count, whole);
}

__global__ void __launch_bounds__(threads)
    adamw_kernel(const Entry* table, const float* clip_coef, const float* lr, const int32_t* step_pointer,
                 const int64_t* seed_pointer, int64_t tensors, int64_t chunk_size, double beta1, double beta2,
                 double epsilon) {
    const float coef = *clip_coef;
    if (!isfinite(coef)) {
        return;
    }
    // Chunk blockIdx.x belongs to the last tensor whose first chunk is at or before it. An empty tensor has the same
    // first chunk as the next tensor.
    int64_t begun = 0;
    for (int64_t base = 0; base < tensors; base += threads) {
        const int64_t i = base + threadIdx.x;
        begun += __syncthreads_count(i < tensors && table[i].first_chunk <= blockIdx.x);
    }
    const Entry entry = table[begun - 1];
    const int step = *step_pointer;
    const int64_t seed = *seed_pointer;
    __shared__ Rates shared;
    if (threadIdx.x == 0) {
        shared = rates(coef, *lr, step, entry.weight_decay, beta1, beta2, epsilon);
    }
    __syncthreads();
    const Rates r = shared;

    const uintptr_t addresses = reinterpret_cast<uintptr_t>(entry.grad) | reinterpret_cast<uintptr_t>(entry.master) |
                                reinterpret_cast<uintptr_t>(entry.m) | reinterpret_cast<uintptr_t>(entry.v) |
                                reinterpret_cast<uintptr_t>(entry.copy);
    const bool aligned = addresses % 16 == 0;
    const int64_t begin = (blockIdx.x - entry.first_chunk) * chunk_size;
    const int64_t end = min(begin + chunk_size, entry.size);
    for (int64_t first = begin + threadIdx.x * octet; first < end; first += threads * octet) {
        const int64_t count = end - first;
        const bool whole = aligned && count >= octet;
        float g[octet], p[octet], m[octet], v[octet];
        load(entry.grad, entry.flags & grad_bf16, first, g, count, whole);
        load(entry.m, entry.flags & m_bf16, first, m, count, whole);
        load(entry.v, entry.flags & v_bf16, first, v, count, whole);
        load(entry.master, entry.flags & master_bf16, first, p, count, whole);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            g[i] = __fmul_rn(g[i], r.coef);
            m[i] = __fadd_rn(__fmul_rn(m[i], r.beta1), __fmul_rn(g[i], r.rest1));
            v[i] = __fadd_rn(__fmul_rn(v[i], r.beta2), __fmul_rn(__fmul_rn(g[i], g[i]), r.rest2));
            const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v[i]), r.correction2), r.epsilon);
            p[i] = __fsub_rn(__fmul_rn(p[i], r.decay), __fmul_rn(r.rate, __fdiv_rn(m[i], root)));
        }
        store_state(entry.m, entry.flags & m_bf16, first, m, count, whole, seed, entry.stream ^ m_stream, step);
        store_state(entry.v, entry.flags & v_bf16, first, v, count, whole, seed, entry.stream ^ v_stream, step);
        store_state(entry.master, entry.flags & master_bf16, first, p, count, whole, seed,
                    entry.stream ^ master_stream, step);
        if (entry.copy != nullptr) {
            store(entry.copy, entry.flags & copy_bf16, first, p, count, whole);
        }
    }
}

}  // namespace

void adamw(const void* table, const void* clip_coef, const void* lr, const void* step, const void* seed,
           int64_t tensors, int64_t chunks, int64_t chunk_size, double beta1, double beta2, double epsilon,
           cudaStream_t stream) {
    check_pointer(table, op, "table", 8);
    check_pointer(clip_coef, op, "clip_coef", 4);
    check_pointer(lr, op, "lr", 4);
    check_pointer(step, op, "step", 4);
    check_pointer(seed, op, "seed", 8);
    check_positive(tensors, op, "tensors");
    check_positive(chunks, op, "chunks");
    check_positive(chunk_size, op, "chunk_size");
    SUROGATE_REQUIRE(chunk_size % octet == 0, op,
                     "chunk_size must be a multiple of 8, got " + std::to_string(chunk_size));
    SUROGATE_REQUIRE(beta1 >= 0 && beta1 < 1, op, "beta1 must be in [0, 1), got " + std::to_string(beta1));
    SUROGATE_REQUIRE(beta2 >= 0 && beta2 < 1, op, "beta2 must be in [0, 1), got " + std::to_string(beta2));
    SUROGATE_REQUIRE(epsilon > 0, op, "epsilon must be positive, got " + std::to_string(epsilon));
    adamw_kernel<<<to_int(chunks, op, "chunks"), threads, 0, stream>>>(
        static_cast<const Entry*>(table), static_cast<const float*>(clip_coef), static_cast<const float*>(lr),
        static_cast<const int32_t*>(step), static_cast<const int64_t*>(seed), tensors, chunk_size, beta1, beta2,
        epsilon);
    check_launch(op);
}

}  // namespace surogate
