// Lengths of documents and their offsets in packed tensors, in elements, as cuDNN's ragged tensors require them.
//
//   start(d) = clamp(cu_seqlens[d] - first, 0, tokens)
//   lengths[d] = start(d + 1) - start(d)          offsets[i][d] = start(d) * elements[i]
//
//   cu_seqlens   [documents + 1] int32, ascending
//   lengths      [documents] int32, written
//   offsets      [count, documents + 1] int64, written
//
// Grid: documents + 1 threads. Moves a few kilobytes; launch latency dominates.

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "attention.h"
#include "surogate/check.h"

namespace surogate {
namespace {

constexpr int threads = 256;

struct Elements {
    int64_t of[max_ragged_tensors];
    int count;
};

__global__ void __launch_bounds__(threads)
    ragged_offsets_kernel(const int* cu_seqlens, int* lengths, int64_t* offsets, int documents, int first, int tokens,
                          Elements elements) {
    const int document = blockIdx.x * threads + threadIdx.x;
    if (document > documents) {
        return;
    }
    const auto start_of = [&](int d) { return min(max(cu_seqlens[d] - first, 0), tokens); };
    const int start = start_of(document);
    if (document < documents) {
        lengths[document] = start_of(document + 1) - start;
    }
#pragma unroll
    for (int i = 0; i < max_ragged_tensors; ++i) {
        if (i == elements.count) {
            break;
        }
        offsets[static_cast<int64_t>(i) * (documents + 1) + document] = start * elements.of[i];
    }
}

}  // namespace

void ragged_offsets(const void* cu_seqlens, void* lengths, void* offsets, int64_t documents, int64_t first,
                    int64_t tokens, const int64_t* elements, int64_t count, cudaStream_t stream) {
    constexpr auto op = "ragged_offsets";
    check_pointer(cu_seqlens, op, "cu_seqlens", 4);
    check_pointer(lengths, op, "lengths", 4);
    check_pointer(offsets, op, "offsets", 8);
    check_positive(documents, op, "documents");
    check_positive(tokens, op, "tokens");
    SUROGATE_REQUIRE(first >= 0, op, "first must not be negative, got " + std::to_string(first));
    SUROGATE_REQUIRE(count > 0 && count <= max_ragged_tensors, op,
                     "count must be between 1 and 4, got " + std::to_string(count));
    Elements all{};
    all.count = static_cast<int>(count);
    for (int i = 0; i < all.count; ++i) {
        check_positive(elements[i], op, "elements");
        all.of[i] = elements[i];
    }
    const int blocks = to_int(ceil_div(documents + 1, threads), op, "documents");
    ragged_offsets_kernel<<<blocks, threads, 0, stream>>>(
        static_cast<const int*>(cu_seqlens), static_cast<int*>(lengths), static_cast<int64_t*>(offsets),
        to_int(documents, op, "documents"), to_int(first, op, "first"), to_int(tokens, op, "tokens"), all);
    check_launch(op);
}

}  // namespace surogate
