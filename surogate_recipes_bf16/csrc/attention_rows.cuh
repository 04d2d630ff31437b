// Rows of the attention kernels: sizes, the rows that a row attends to, and where the rows of a head are. attention_plain.cu
// documents layouts.
//
// A block owns a tile of consecutive rows of [0, T], and iterates over tiles of the rows that they need (the streamed
// tiles). A tile may contain rows of several documents. A block iterates over all rows that any of its rows needs and masks
// those that a row does not attend to. So the work is the causal triangle of each document, or the band of its window,
// rounded up to tiles; the number of documents, empty ones included, does not matter.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <string>

#include "surogate/check.h"

namespace surogate::attention {

constexpr int most_owned = 64;  // rows of the tile that a block of a backward kernel owns at most

// Tensors begin at token `first` of the micro-batch, but for cu_seqlens and the rows of lse, which have all its tokens.
struct Sizes {
    int tokens;
    int documents;
    int heads;
    int groups;
    int head_dim;
    float scale;
    float softcap;  // 0: none
    int window;     // the largest number of keys that a query sees
    int first;
    int64_t lse_row;  // tokens from a head of lse to the next one
    bool own = true;  // backward: out and lse are those of attention, whose rounding may be corrected
};

// --------------------------------------------------------------------------------------------------------- documents

// Returns the document of a token: the last one that starts at or before it. Empty documents may start there too.
__device__ inline int document_of(const int* cu_seqlens, int documents, int token) {
    int low = 0, high = documents;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (cu_seqlens[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Returns the first key that a query sees: that of its document or of its window; INT_MAX for a row beyond the last
// token.
__device__ inline int first_key(const int* cu_seqlens, const Sizes& sizes, int query) {
    if (query >= sizes.tokens) {
        return INT_MAX;
    }
    const int start = cu_seqlens[document_of(cu_seqlens, sizes.documents, sizes.first + query)] - sizes.first;
    return max(start, query - sizes.window + 1);
}

// Returns the end (exclusive) of the queries that see a key, or 0 for a row beyond the last token.
__device__ inline int queries_end(const int* cu_seqlens, const Sizes& sizes, int key) {
    if (key >= sizes.tokens) {
        return 0;
    }
    const int document = document_of(cu_seqlens, sizes.documents, sizes.first + key);
    const int end = min(cu_seqlens[document + 1] - sizes.first, sizes.tokens);
    return end - key < sizes.window ? end : key + sizes.window;
}

// --------------------------------------------------------------------------------------------------------------- heads

// The columns of one head in a row-major tensor. Row t begins at data + t * stride.
template <class T>
struct Head {
    T* data;
    int64_t stride;
    int columns;
};

// Returns a head of qkv or dqkv [T, (H + 2 G) D]. Query head h has index h, key head g index H + g, value head g index
// H + G + g.
template <class T>
__device__ Head<T> qkv_head(T* qkv, const Sizes& sizes, int index) {
    return {qkv + static_cast<int64_t>(index) * sizes.head_dim,
            static_cast<int64_t>(sizes.heads + 2 * sizes.groups) * sizes.head_dim, sizes.head_dim};
}

// Returns a head of out or dout [T, H D].
template <class T>
__device__ Head<T> out_head(T* out, const Sizes& sizes, int head) {
    return {out + static_cast<int64_t>(head) * sizes.head_dim, static_cast<int64_t>(sizes.heads) * sizes.head_dim,
            sizes.head_dim};
}

// ----------------------------------------------------------------------------------------------------------- host code

inline Sizes checked_sizes(int64_t tokens, int64_t documents, int64_t heads, int64_t kv_heads, int64_t head_dim,
                           int64_t window, double scale, double softcap, const char* op) {
    check_positive(tokens, op, "tokens");
    check_positive(documents, op, "documents");
    check_positive(heads, op, "heads");
    check_positive(kv_heads, op, "kv_heads");
    SUROGATE_REQUIRE(heads % kv_heads == 0, op,
                     std::to_string(heads) + " heads cannot share " + std::to_string(kv_heads) + " kv_heads evenly");
    SUROGATE_REQUIRE(heads <= 65535, op, "heads must be at most 65535, got " + std::to_string(heads));
    // The last tile may extend beyond the last token, by less than 128; its row indices must not overflow.
    SUROGATE_REQUIRE(tokens <= INT_MAX - 2 * most_owned, op, "tokens must fit in 31 bits, got " + std::to_string(tokens));
    SUROGATE_REQUIRE(head_dim > 0 && head_dim % 8 == 0 && head_dim <= 256, op,
                     "head_dim must be a multiple of 8 up to 256, got " + std::to_string(head_dim));
    SUROGATE_REQUIRE(window >= 0, op, "window must not be negative, got " + std::to_string(window));
    SUROGATE_REQUIRE(scale > 0, op, "scale must be positive, got " + std::to_string(scale));
    SUROGATE_REQUIRE(softcap >= 0, op, "softcap must not be negative, got " + std::to_string(softcap));
    const bool whole = window == 0 || window > tokens;
    return {static_cast<int>(tokens),
            to_int(documents, op, "documents"),
            static_cast<int>(heads),
            static_cast<int>(kv_heads),
            static_cast<int>(head_dim),
            static_cast<float>(scale),
            static_cast<float>(softcap),
            static_cast<int>(whole ? tokens : window),
            0,
            tokens};
}

inline void check_forward(const void* qkv, const void* cu_seqlens, const void* out, const void* lse, const char* op) {
    check_pointer(qkv, op, "qkv", 16);
    check_pointer(cu_seqlens, op, "cu_seqlens", 4);
    check_pointer(out, op, "out", 16);
    check_pointer(lse, op, "lse", 4);
}

// Tensors of a backward, in the layouts of attention_plain_dq.cu. `corrected_lse` follows `delta` in the workspace.
template <class T>
struct Backward {
    const T* dout;
    const T* qkv;
    const T* out;
    const float* lse;
    const int* cu_seqlens;
    const float* dlse;  // null: zeros
    T* dqkv;
    float* delta;
    float* corrected_lse;
};

template <class T>
Backward<T> backward_of(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens,
                        const void* dlse, void* dqkv, void* workspace) {
    return {static_cast<const T*>(dout),
            static_cast<const T*>(qkv),
            static_cast<const T*>(out),
            static_cast<const float*>(lse),
            static_cast<const int*>(cu_seqlens),
            static_cast<const float*>(dlse),
            static_cast<T*>(dqkv),
            static_cast<float*>(workspace),
            nullptr};
}

// Calls launch(tensors, sizes) for one chunk of rows after another, with one workspace.
template <class T, class Launch>
void in_chunks(const Backward<T>& whole, const Sizes& sizes, int64_t chunks, const char* op, Launch launch) {
    check_pointer(whole.dout, op, "dout", 16);
    check_pointer(whole.qkv, op, "qkv", 16);
    check_pointer(whole.out, op, "out", 16);
    check_pointer(whole.lse, op, "lse", 4);
    check_pointer(whole.cu_seqlens, op, "cu_seqlens", 4);
    if (whole.dlse) {
        check_pointer(whole.dlse, op, "dlse", 4);
    }
    check_pointer(whole.dqkv, op, "dqkv", 16);
    check_pointer(whole.delta, op, "workspace", 4);
    const int tokens = sizes.tokens;
    SUROGATE_REQUIRE(chunks > 0 && tokens % chunks == 0, op,
                     std::to_string(tokens) + " tokens cannot be divided into " + std::to_string(chunks) + " chunks");
    Sizes of_chunk = sizes;
    of_chunk.tokens = static_cast<int>(tokens / chunks);
    SUROGATE_REQUIRE(chunks == 1 || of_chunk.tokens % most_owned == 0, op,
                     "chunks must have a multiple of 64 tokens, got " + std::to_string(of_chunk.tokens));
    Backward<T> chunk = whole;
    chunk.corrected_lse = chunk.delta + static_cast<int64_t>(of_chunk.tokens) * sizes.heads;
    const int64_t out_row = static_cast<int64_t>(sizes.heads) * sizes.head_dim;
    const int64_t qkv_row = out_row + static_cast<int64_t>(2 * sizes.groups) * sizes.head_dim;
    for (; of_chunk.first < tokens; of_chunk.first += of_chunk.tokens) {
        const int64_t first = of_chunk.first;
        chunk.dout = whole.dout + first * out_row;
        chunk.qkv = whole.qkv + first * qkv_row;
        chunk.out = whole.out + first * out_row;
        chunk.lse = whole.lse + first;
        chunk.dlse = whole.dlse ? whole.dlse + first : nullptr;
        chunk.dqkv = whole.dqkv + first * qkv_row;
        launch(chunk, of_chunk);
    }
}

}  // namespace surogate::attention
