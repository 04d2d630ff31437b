// Sums over the documents of a micro-batch, and their gradient.
//
//   document_sums       sums[d] = sum of values[t], labels[d] = number of targets[t] >= 0, over start[d] <= t < stop[d]
//   document_sums_bwd   d_values[t] = d_sums of the document that t is in, else 0
//
//   values, d_values    fp32 [tokens]
//   targets             int32 [tokens]
//   groups              int32 [documents, 2]: start and stop, within the tokens and ascending; unused entries are 0, and last
//   sums, labels, d_sums  fp32 [documents]
//
// Pointers are aligned to their element. Grid: a block of 256 threads per document, which adds in a fixed order; in the
// backward pass a thread per token, which searches its document among those. Bytes moved per token: 8 read; 4 written in
// the backward pass.

#include <surogate/check.h>
#include <surogate/reduce.cuh>

#include "documents.h"

namespace surogate {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    document_sums_kernel(const float* __restrict__ values, const int32_t* __restrict__ targets,
                         const int32_t* __restrict__ groups, float* __restrict__ sums, float* __restrict__ labels) {
    __shared__ float scratch[32];
    const int64_t document = blockIdx.x;
    const int64_t stop = groups[2 * document + 1];
    float sum = 0.0f;
    int count = 0;
    for (int64_t t = groups[2 * document] + threadIdx.x; t < stop; t += threads) {
        sum += values[t];
        count += targets[t] >= 0;
    }
    sum = block_sum(sum, scratch);
    const float counted = block_sum(static_cast<float>(count), scratch);  // exact below 2^24
    if (threadIdx.x == 0) {
        sums[document] = sum;
        labels[document] = counted;
    }
}

__global__ void __launch_bounds__(threads)
    document_sums_bwd_kernel(const float* __restrict__ d_sums, const int32_t* __restrict__ groups,
                             float* __restrict__ d_values, int64_t tokens, int64_t documents) {
    const int64_t t = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    if (t >= tokens) {
        return;
    }
    int64_t first = 0, last = documents;  // documents before `first` begin at t or before, those from `last` on do not
    while (first < last) {
        const int64_t middle = (first + last) / 2;
        const int32_t start = groups[2 * middle];
        if (start <= t && start < groups[2 * middle + 1]) {
            first = middle + 1;
        } else {
            last = middle;
        }
    }
    d_values[t] = first > 0 && t < groups[2 * first - 1] ? d_sums[first - 1] : 0.0f;
}

}  // namespace

void document_sums(const float* values, const int32_t* targets, const int32_t* groups, float* sums, float* labels,
                   int64_t tokens, int64_t documents, cudaStream_t stream) {
    constexpr const char* op = "document_sums";
    check_positive(tokens, op, "tokens");
    check_positive(documents, op, "documents");
    check_pointers(op, values, targets, groups, sums, labels);
    document_sums_kernel<<<to_int(documents, op, "documents"), threads, 0, stream>>>(values, targets, groups, sums, labels);
    check_launch(op);
}

void document_sums_bwd(const float* d_sums, const int32_t* groups, float* d_values, int64_t tokens, int64_t documents,
                       cudaStream_t stream) {
    constexpr const char* op = "document_sums_bwd";
    check_positive(tokens, op, "tokens");
    check_positive(documents, op, "documents");
    check_pointers(op, d_sums, groups, d_values);
    const int blocks = to_int(ceil_div(tokens, threads), op, "tokens / 256");
    document_sums_bwd_kernel<<<blocks, threads, 0, stream>>>(d_sums, groups, d_values, tokens, documents);
    check_launch(op);
}

}  // namespace surogate
