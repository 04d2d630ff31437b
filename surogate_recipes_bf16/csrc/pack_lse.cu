// Log-sum-exps of documents of equal lengths in the order in which cuDNN's dense backward reads them.
//
//   packed[d, h, s] = lse[h, d * seq_len + s]
//
//   lse      [heads, row] fp32; row is a multiple of seq_len and at least documents * seq_len
//   packed   [documents, heads, seq_len] fp32, written
//
// A thread moves 16 bytes if seq_len is a multiple of 4 and both pointers are aligned to 16 bytes, else 4 bytes. Bytes:
// lse and packed once, 1 MB for 32 heads of 4,096 tokens: launch latency dominates.

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "attention.h"
#include "surogate/check.h"

namespace surogate {
namespace {

constexpr int threads = 256;

// `columns` is seq_len in words, `stride` is `row` in words.
template <class Word>
__global__ void __launch_bounds__(threads)
    pack_lse_kernel(const Word* lse, Word* packed, int documents, int heads, int columns, int64_t stride) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    const int64_t row = index / columns, column = index % columns;  // a row of `packed` is one head of one document
    if (row >= static_cast<int64_t>(documents) * heads) {
        return;
    }
    const int64_t document = row / heads, head = row % heads;
    packed[index] = lse[head * stride + document * columns + column];
}

template <class Word>
void launch(const void* lse, void* packed, int64_t documents, int64_t heads, int64_t columns, int64_t stride,
            const char* op, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(to_int(ceil_div(documents * heads * columns, threads), op, "blocks"));
    pack_lse_kernel<Word><<<blocks, threads, 0, stream>>>(static_cast<const Word*>(lse), static_cast<Word*>(packed),
                                                          to_int(documents, op, "documents"), to_int(heads, op, "heads"),
                                                          to_int(columns, op, "seq_len"), stride);
}

}  // namespace

void pack_lse(const void* lse, void* packed, int64_t documents, int64_t heads, int64_t seq_len, int64_t row,
              cudaStream_t stream) {
    constexpr auto op = "pack_lse";
    constexpr uintptr_t word = sizeof(float4);
    check_pointer(lse, op, "lse", sizeof(float));
    check_pointer(packed, op, "packed", sizeof(float));
    check_positive(documents, op, "documents");
    check_positive(heads, op, "heads");
    check_positive(seq_len, op, "seq_len");
    SUROGATE_REQUIRE(row >= documents * seq_len && row % seq_len == 0, op,
                     "row must be a multiple of seq_len that holds all documents, got " + std::to_string(row));
    if (seq_len % 4 == 0 && is_aligned(lse, word) && is_aligned(packed, word)) {
        launch<float4>(lse, packed, documents, heads, seq_len / 4, row / 4, op, stream);
    } else {
        launch<float>(lse, packed, documents, heads, seq_len, row, op, stream);
    }
    check_launch(op);
}

}  // namespace surogate
