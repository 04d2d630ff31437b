// The numerics report.
//
//   fp8_count   for x in bf16 and a scale (decode, encode), with e = encode, or 1 if encode is 0:
//                 amax   = (largest finite |x|, 1 if an x was not finite)
//                 counts = how often |x e| > clipped, |x e| <= lost although x is not 0, x is not 0
//               `clipped` is the largest number that rounds to the format's largest, `lost` the largest that rounds to 0
//               (formats.py).
//
//   fp8_report  the figures of n tensors, fp32 [n, 5]:
//                 amax[0];  amax[0] e / maximum;  counts[0] / elements;  counts[1] / counts[2], 0 if that is 0;
//                 age: L - i for the newest entry i of its column of history [L, q] of which the scale was made; L if
//                 there is none, because it has just left; 0 without a column, or if encode is 0
//
//   table       entries of 6 int64 words in device memory: addresses of amax, counts and scale, maximum as fp64,
//               elements, column or -1
//
// Counts are integers, so that the order of the additions does not matter. Bytes moved by fp8_count: 2 per element. The
// arithmetic, about 8 instructions an element, keeps it near 60 % of bandwidth; it runs in one micro-step of many.
#include "numerics.h"

#include <surogate/check.h>
#include <surogate/reduce.cuh>

#include <algorithm>
#include <cfloat>

#include "fp8.cuh"

namespace surogate {
namespace {

struct Entry {
    const float* amax;
    const int64_t* counts;
    const float* scale;
    double maximum;
    int64_t elements;
    int64_t column;
};
static_assert(sizeof(Entry) == 6 * sizeof(int64_t));

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // vectors that a thread loads before it reads their values
constexpr int64_t kMaxBlocks = 1056;  // 8 for each SM of an H200
constexpr int kColumns = 5;

__device__ __forceinline__ float used_encode(float encode) { return encode == 0 ? 1.0f : encode; }

__global__ void __launch_bounds__(kThreads)
    count_kernel(const __nv_bfloat16* x, const float* scale, float* amax, unsigned long long* counts, int64_t octets,
                 float most, float least) {
    __shared__ uint32_t tops[kThreads / 32];
    __shared__ int scratch[32];
    const float encode = used_encode(scale[1]);
    AbsMax top;
    int clipped = 0, lost = 0, others = 0;
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < octets;
         first += kBatch * stride) {
        Octet octet[kBatch] = {};  // zeros beyond the end count nowhere
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (first + i * stride < octets) {
                octet[i] = Octet::load(x + 8 * (first + i * stride));
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            float values[8];
            octet[i].to_float(values);
            top.add(octet[i]);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float scaled = fabsf(__fmul_rn(values[k], encode));
                const bool counts_at_all = values[k] != 0;
                clipped += scaled > most;
                lost += counts_at_all && scaled <= least;
                others += counts_at_all;
            }
        }
    }
    top.stage(tops);
    clipped = block_sum(clipped, scratch);
    lost = block_sum(lost, scratch);
    others = block_sum(others, scratch);
    AbsMax::raise(tops, amax);
    if (threadIdx.x == 0) {
        atomicAdd(counts, static_cast<unsigned long long>(clipped));
        atomicAdd(counts + 1, static_cast<unsigned long long>(lost));
        atomicAdd(counts + 2, static_cast<unsigned long long>(others));
    }
}

// One block per tensor.
__global__ void __launch_bounds__(kThreads)
    report_kernel(const Entry* table, const float* history, float* out, int64_t length, int64_t quantizers) {
    __shared__ int scratch[32];
    const Entry entry = table[blockIdx.x];
    const float given = entry.scale[1], maximum = static_cast<float>(entry.maximum);
    int made = 0;
    if (entry.column >= 0) {
        for (int64_t i = threadIdx.x; i < length; i += kThreads) {
            const float seen = history[i * quantizers + entry.column];
            if (seen > 0 && fminf(__fdiv_rn(maximum, seen), FLT_MAX) == given) {
                made = static_cast<int>(i);
            }
        }
    }
    made = block_max(made, scratch, 0);
    if (threadIdx.x == 0) {
        const float amax = entry.amax[0];
        const int64_t lost = entry.counts[1], others = entry.counts[2];
        float* row = out + static_cast<int64_t>(blockIdx.x) * kColumns;
        row[0] = amax;
        row[1] = __fdiv_rn(__fmul_rn(amax, used_encode(given)), maximum);
        row[2] = __fdiv_rn(__ll2float_rn(entry.counts[0]), __ll2float_rn(entry.elements));
        row[3] = others > 0 ? __fdiv_rn(__ll2float_rn(lost), __ll2float_rn(others)) : 0.0f;
        row[4] = entry.column < 0 || given == 0 ? 0.0f : static_cast<float>(length - made);
    }
}

}  // namespace

void fp8_count(const void* x, const void* scale, void* amax, void* counts, int64_t elements, float clipped,
               float lost, cudaStream_t stream) {
    constexpr const char* op = "fp8_count";
    check_positive(elements, op, "elements");
    SUROGATE_REQUIRE(elements % 8 == 0, op, "elements must be a multiple of 8, got " + std::to_string(elements));
    check_pointer(x, op, "x", 16);
    check_pointer(scale, op, "scale", 8);
    check_pointer(amax, op, "amax", 8);
    check_pointer(counts, op, "counts", 8);
    check_cuda(cudaMemsetAsync(amax, 0, 8, stream), op);
    check_cuda(cudaMemsetAsync(counts, 0, 24, stream), op);
    const int64_t octets = elements / 8;
    const auto blocks = static_cast<unsigned>(std::min(kMaxBlocks, ceil_div(octets, kThreads * kBatch)));
    count_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(x),
                                                  static_cast<const float*>(scale), static_cast<float*>(amax),
                                                  static_cast<unsigned long long*>(counts), octets, clipped, lost);
    check_launch(op);
}

void fp8_report(const void* table, const void* history, void* out, int64_t tensors, int64_t length, int64_t quantizers,
                cudaStream_t stream) {
    constexpr const char* op = "fp8_report";
    check_pointer(table, op, "table", 8);
    check_pointer(out, op, "out", 4);
    SUROGATE_REQUIRE(is_aligned(history, 4), op, "history must be aligned to 4 bytes");
    SUROGATE_REQUIRE(length == 0 || history != nullptr, op, "history is null");
    report_kernel<<<to_int(tensors, op, "tensors"), kThreads, 0, stream>>>(
        static_cast<const Entry*>(table), static_cast<const float*>(history), static_cast<float*>(out), length,
        quantizers);
    check_launch(op);
}

}  // namespace surogate
