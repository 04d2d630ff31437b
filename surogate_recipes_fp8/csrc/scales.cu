// Ops on the scales and amax of n quantizers, one launch each. A scale is fp32 [2] = (decode, encode), an amax fp32 [2] =
// (largest finite |x|, 1 if an x was not finite). Maximum: the largest value of a quantizer's format.
//
//   fp8_scales  encode = min(maximum / amax[0], FLT_MAX), 1 if amax[0] is 0;  decode = 1 / encode
//
//   fp8_update  the delayed scaling of TransformerEngine, per quantizer, with history [L, n] in fp32 and last = amax[0]:
//                 a = max(history[1 .. L - 1], last)
//                 history[i] = history[i + 1] for i < L - 1;  history[L - 1] = last;  then history[0] = 0
//                 encode = min(maximum / a, FLT_MAX);  decode = 1 / encode
//                 amax = (0, 0)
//               If last is 0, or clip_coef is not finite (the step is skipped), history and scale stay as they are,
//               except that the scale (0, 0) of a quantizer before its first update becomes (1, 0): products read decode.
//
//   fp8_guard   norm = infinity and guarded = NaN, if amax[1] of any quantizer is not 0; otherwise norm stays as it is and
//               guarded = clip_coef
//
//   table       entries of 3 int64 words in device memory: addresses of amax and scale, maximum as fp64. fp8_guard reads
//               the amax alone; fp8_scales takes one maximum for all.
//
// Grid: fp8_scales has a thread per quantizer; fp8_guard one block. fp8_update has one block per 32 quantizers: lane q of
// every warp has quantizer q, and each of the 32 warps moves a part of the history, so that rows are read and written in
// whole sectors.
//
// Bytes moved by fp8_update: 8 L n, which is 2.4 MB for L = 1024 and 288 quantizers. The blocks are few: about 5 us,
// once per optimizer step.
#include "scales.h"

#include <surogate/check.h>
#include <surogate/reduce.cuh>

#include <cfloat>

namespace surogate {
namespace {

struct Entry {
    float* amax;
    float* scale;
    double maximum;
};
static_assert(sizeof(Entry) == 3 * sizeof(int64_t));

constexpr int kThreads = 256;
constexpr int kWarps = 32;
constexpr int kBatch = 8;  // rows of the history that a thread loads before it stores them

__device__ __forceinline__ void write_scale(float* scale, float encode) {
    scale[0] = __fdiv_rn(1.0f, encode);
    scale[1] = encode;
}

__global__ void __launch_bounds__(kThreads) scales_kernel(const Entry* table, int64_t quantizers, float maximum) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < quantizers) {
        const float amax = table[i].amax[0];
        write_scale(table[i].scale, amax == 0 ? 1.0f : fminf(__fdiv_rn(maximum, amax), FLT_MAX));
    }
}

__global__ void __launch_bounds__(32 * kWarps)
    update_kernel(const Entry* table, const float* clip_coef, float* history, int64_t length, int64_t quantizers) {
    __shared__ float tops[kWarps][32];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const int64_t q = static_cast<int64_t>(blockIdx.x) * 32 + lane;
    const bool exists = q < quantizers;
    const Entry entry = exists ? table[q] : Entry{};
    const float last = exists ? entry.amax[0] : 0.0f;
    const bool moves = last > 0 && isfinite(*clip_coef);

    // This warp writes rows [begin, end) and reads [begin + 1, end + 1). Row `end` belongs to the next warp, which
    // overwrites it: read it first.
    const int64_t begin = warp * length / kWarps, end = (warp + 1) * length / kWarps;
    float* column = history + q;
    float next = last;
    if (moves && begin < end && end < length) {
        next = column[end * quantizers];
    }
    __syncthreads();
    float top = last;
    if (moves) {
        for (int64_t first = begin; first < end; first += kBatch) {
            float values[kBatch];
#pragma unroll
            for (int k = 0; k < kBatch; ++k) {
                const int64_t i = first + k;
                values[k] = i + 1 < end ? column[(i + 1) * quantizers] : i < end ? next : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < kBatch; ++k) {
                const int64_t i = first + k;
                top = fmaxf(top, values[k]);
                if (i < end) {
                    column[i * quantizers] = i == 0 ? 0.0f : values[k];
                }
            }
        }
    }
    tops[warp][lane] = top;
    __syncthreads();
    if (warp != 0 || !exists) {
        return;
    }
    if (moves) {
        for (int other = 1; other < kWarps; ++other) {
            top = fmaxf(top, tops[other][lane]);
        }
        write_scale(entry.scale, fminf(__fdiv_rn(static_cast<float>(entry.maximum), top), FLT_MAX));
    } else if (entry.scale[0] == 0) {
        entry.scale[0] = 1;
    }
    entry.amax[0] = 0;
    entry.amax[1] = 0;
}

__global__ void __launch_bounds__(kThreads)
    guard_kernel(const Entry* table, float* norm, const float* clip_coef, float* guarded, int64_t quantizers) {
    bool found = false;
    for (int64_t i = threadIdx.x; i < quantizers; i += kThreads) {
        found |= table[i].amax[1] != 0;
    }
    found = __syncthreads_or(found);
    if (threadIdx.x == 0) {
        *guarded = found ? nanf("") : *clip_coef;
        if (found) {
            *norm = INFINITY;
        }
    }
}

void check(const void* table, int64_t quantizers, const char* op) {
    check_pointer(table, op, "table", 8);
    check_positive(quantizers, op, "quantizers");
}

}  // namespace

void fp8_scales(const void* table, int64_t quantizers, float maximum, cudaStream_t stream) {
    constexpr const char* op = "fp8_scales";
    check(table, quantizers, op);
    SUROGATE_REQUIRE(maximum > 0, op, "maximum must be positive, got " + std::to_string(maximum));
    scales_kernel<<<to_int(ceil_div(quantizers, kThreads), op, "quantizers"), kThreads, 0, stream>>>(
        static_cast<const Entry*>(table), quantizers, maximum);
    check_launch(op);
}

void fp8_update(const void* table, const void* clip_coef, void* history, int64_t length, int64_t quantizers,
                cudaStream_t stream) {
    constexpr const char* op = "fp8_update";
    check(table, quantizers, op);
    check_pointer(clip_coef, op, "clip_coef", 4);
    check_pointer(history, op, "history", 4);
    check_positive(length, op, "length");
    update_kernel<<<to_int(ceil_div(quantizers, 32), op, "quantizers"), dim3(32, kWarps), 0, stream>>>(
        static_cast<const Entry*>(table), static_cast<const float*>(clip_coef), static_cast<float*>(history), length,
        quantizers);
    check_launch(op);
}

void fp8_guard(const void* table, void* norm, const void* clip_coef, void* guarded, int64_t quantizers,
               cudaStream_t stream) {
    constexpr const char* op = "fp8_guard";
    check(table, quantizers, op);
    check_pointer(norm, op, "norm", 4);
    check_pointer(clip_coef, op, "clip_coef", 4);
    check_pointer(guarded, op, "guarded", 4);
    guard_kernel<<<1, kThreads, 0, stream>>>(static_cast<const Entry*>(table), static_cast<float*>(norm),
                                             static_cast<const float*>(clip_coef), static_cast<float*>(guarded),
                                             quantizers);
    check_launch(op);
}

}  // namespace surogate
