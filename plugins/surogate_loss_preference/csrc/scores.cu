// A score of each document of a micro-batch, and its gradients. r(d) is the last token of document d that is not `padding`,
// or its first token if all are.
//
//   document_scores        scores[d] = sum_c x[r(d), c] weight[c], used[d] = 1
//   document_scores_dgrad  dx[r(d), c] = d_scores[d] weight[c], 0 in all other rows
//   document_scores_wgrad  dw[c] (+)= sum_d d_scores[d] x[r(d), c]
//
//   x, dx               fp32 or bf16 [tokens, width]
//   weight, dw          fp32 or bf16 [width]
//   tokens              int32 [n_tokens]
//   groups              int32 [documents, 2]: start and stop, within the tokens and ascending; unused entries are 0, and
//                       last, with a score of 0
//   scores, used, d_scores  fp32 [documents]
//
// Sums are fp32, in a fixed order. Pointers are aligned to their element. A warp looks for r(d) from the end of a document, 32
// tokens at a time: the first read finds it unless the document ends in padding.
//
// Grid: a block of 256 threads per document; of dw a block per 256 columns, whose warps look for the rows of 256 documents at a
// time. Bytes moved: a row of x and the weight per document; dx once, which cudaMemsetAsync clears before, so that its time is
// that of n_tokens * width elements.

#include <surogate/check.h>
#include <surogate/dispatch.cuh>
#include <surogate/reduce.cuh>
#include <surogate/vec.cuh>

#include "scores.h"

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr int warps = threads / 32;

// Every lane gets r(d), or -1 if the document is unused.
__device__ __forceinline__ int64_t score_row(const int32_t* tokens, const int32_t* groups, int64_t document,
                                             int64_t padding) {
    const int start = groups[2 * document], stop = groups[2 * document + 1];
    if (stop <= start) {
        return -1;
    }
    for (int end = stop; end > start; end -= 32) {
        const int t = end - 1 - static_cast<int>(threadIdx.x % 32);
        const int found = warp_max(t >= start && tokens[t] != padding ? t : -1);
        if (found >= 0) {
            return found;
        }
    }
    return start;
}

template <class T, class W>
__global__ void __launch_bounds__(threads)
    document_scores_kernel(const T* __restrict__ x, const W* __restrict__ weight, const int32_t* __restrict__ tokens,
                           const int32_t* __restrict__ groups, float* __restrict__ scores, float* __restrict__ used,
                           int64_t width, int64_t padding) {
    __shared__ float scratch[32];
    const int64_t document = blockIdx.x;
    const int64_t row = score_row(tokens, groups, document, padding);  // the same in all warps
    float sum = 0.0f;
    if (row >= 0) {
        for (int64_t c = threadIdx.x; c < width; c += threads) {
            sum += to_float(x[row * width + c]) * to_float(weight[c]);
        }
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        scores[document] = sum;
        used[document] = row >= 0 ? 1.0f : 0.0f;
    }
}

template <class T, class W>
__global__ void __launch_bounds__(threads)
    document_scores_dgrad_kernel(const float* __restrict__ d_scores, const W* __restrict__ weight,
                                 const int32_t* __restrict__ tokens, const int32_t* __restrict__ groups,
                                 T* __restrict__ dx, int64_t width, int64_t padding) {
    const int64_t document = blockIdx.x;
    const int64_t row = score_row(tokens, groups, document, padding);
    if (row < 0) {
        return;
    }
    const float d_score = d_scores[document];
    for (int64_t c = threadIdx.x; c < width; c += threads) {
        dx[row * width + c] = from_float<T>(d_score * to_float(weight[c]));
    }
}

template <class T, class W>
__global__ void __launch_bounds__(threads)
    document_scores_wgrad_kernel(const float* __restrict__ d_scores, const T* __restrict__ x,
                                 const int32_t* __restrict__ tokens, const int32_t* __restrict__ groups, W* dw,
                                 int64_t width, int64_t documents, int64_t padding, bool accumulate) {
    __shared__ int64_t rows[threads];
    __shared__ float slopes[threads];
    const int64_t c = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    float sum = 0.0f;
    for (int64_t first = 0; first < documents; first += threads) {
        const int count = static_cast<int>(documents - first < threads ? documents - first : threads);
        for (int i = warp; i < count; i += warps) {
            const int64_t row = score_row(tokens, groups, first + i, padding);
            if (threadIdx.x % 32 == 0) {
                rows[i] = row;
                slopes[i] = d_scores[first + i];
            }
        }
        __syncthreads();
        if (c < width) {
            for (int i = 0; i < count && rows[i] >= 0; ++i) {
                sum += slopes[i] * to_float(x[rows[i] * width + c]);
            }
        }
        const bool last = rows[count - 1] < 0;  // the same in all threads: unused entries are last
        __syncthreads();
        if (last) {
            break;
        }
    }
    if (c < width) {
        dw[c] = from_float<W>(accumulate ? to_float(dw[c]) + sum : sum);
    }
}

// Checks the sizes, and returns the number of blocks: one per document.
int checked(const char* op, int64_t n_tokens, int64_t width, int64_t documents) {
    check_positive(n_tokens, op, "n_tokens");
    check_positive(width, op, "width");
    check_positive(documents, op, "documents");
    return to_int(documents, op, "documents");
}

}  // namespace

void document_scores(const void* x, const void* weight, const int32_t* tokens, const int32_t* groups, float* scores,
                     float* used, int64_t n_tokens, int64_t width, int64_t documents, int64_t padding, int dtype,
                     int weight_dtype, cudaStream_t stream) {
    constexpr const char* op = "document_scores";
    const int blocks = checked(op, n_tokens, width, documents);
    with_float_type(dtype, op, "x", [&](auto t) {
        using T = typename decltype(t)::type;
        with_float_type(weight_dtype, op, "weight", [&](auto w) {
            using W = typename decltype(w)::type;
            const T* rows = static_cast<const T*>(x);
            const W* columns = static_cast<const W*>(weight);
            check_pointers(op, rows, columns, tokens, groups, scores, used);
            document_scores_kernel<T, W>
                <<<blocks, threads, 0, stream>>>(rows, columns, tokens, groups, scores, used, width, padding);
        });
    });
    check_launch(op);
}

void document_scores_dgrad(const float* d_scores, const void* weight, const int32_t* tokens, const int32_t* groups,
                           void* dx, int64_t n_tokens, int64_t width, int64_t documents, int64_t padding,
                           int weight_dtype, int dx_dtype, cudaStream_t stream) {
    constexpr const char* op = "document_scores_dgrad";
    const int blocks = checked(op, n_tokens, width, documents);
    with_float_type(dx_dtype, op, "dx", [&](auto t) {
        using T = typename decltype(t)::type;
        with_float_type(weight_dtype, op, "weight", [&](auto w) {
            using W = typename decltype(w)::type;
            T* rows = static_cast<T*>(dx);
            const W* columns = static_cast<const W*>(weight);
            check_pointers(op, d_scores, columns, tokens, groups, rows);
            check_cuda(cudaMemsetAsync(dx, 0, static_cast<size_t>(n_tokens * width) * sizeof(T), stream), op);
            document_scores_dgrad_kernel<T, W>
                <<<blocks, threads, 0, stream>>>(d_scores, columns, tokens, groups, rows, width, padding);
        });
    });
    check_launch(op);
}

void document_scores_wgrad(const float* d_scores, const void* x, const int32_t* tokens, const int32_t* groups, void* dw,
                           int64_t n_tokens, int64_t width, int64_t documents, int64_t padding, int dtype, int dw_dtype,
                           bool accumulate, cudaStream_t stream) {
    constexpr const char* op = "document_scores_wgrad";
    checked(op, n_tokens, width, documents);
    check_accumulate(accumulate, dw_dtype, op);
    const int blocks = to_int(ceil_div(width, threads), op, "width / 256");
    with_float_type(dtype, op, "x", [&](auto t) {
        using T = typename decltype(t)::type;
        with_float_type(dw_dtype, op, "dw", [&](auto w) {
            using W = typename decltype(w)::type;
            const T* rows = static_cast<const T*>(x);
            W* columns = static_cast<W*>(dw);
            check_pointers(op, d_scores, rows, tokens, groups, columns);
            document_scores_wgrad_kernel<T, W><<<blocks, threads, 0, stream>>>(d_scores, rows, tokens, groups, columns,
                                                                               width, documents, padding, accumulate);
        });
    });
    check_launch(op);
}

}  // namespace surogate
