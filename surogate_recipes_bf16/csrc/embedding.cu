// embedding: out [T, C] = w[tokens[t]]; tokens int32 [T], w [V, C], out and w of one dtype, fp32 or bf16, row-major.
//
// Copies without arithmetic. A token outside of [0, V) yields a row of NaN: no access is out of bounds, and the error
// becomes visible in the loss. Pointers are aligned to their element; accesses are 16 bytes wide if pointers and rows
// allow it. Grid: a block copies a row or a part of it. Bytes moved: T rows read (fewer if they are in L2) and written.
// Expected: 85 % of bandwidth.
#include <surogate/dispatch.cuh>

#include "elementwise.h"

namespace surogate {
namespace {

constexpr int kMaxThreads = 256;

// Word: the unsigned integer or vector that a thread copies. A row has `words` of them.
template <class Word>
__global__ void __launch_bounds__(kMaxThreads)
    embedding_kernel(const int32_t* tokens, const Word* w, Word* out, int64_t vocab_size, int64_t words) {
    const int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
    if (i >= words) {
        return;
    }
    const int64_t token = tokens[blockIdx.x];
    Word word;
    if (token >= 0 && token < vocab_size) {
        word = w[token * words + i];
    } else {
        memset(&word, 0xff, sizeof(word));  // NaN in fp32 and bf16
    }
    out[blockIdx.x * words + i] = word;
}

}  // namespace

void embedding(const void* tokens, const void* w, void* out, int64_t n_tokens, int64_t vocab_size, int64_t columns,
               int dtype, cudaStream_t stream) {
    constexpr const char* op = "embedding";
    check_positive(n_tokens, op, "n_tokens");
    check_positive(vocab_size, op, "vocab_size");
    check_positive(columns, op, "columns");
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, std::string("w must be fp32 or bf16, not ") + name_of(dtype));
    check_pointer(tokens, op, "tokens", 4);
    check_pointer(w, op, "w", bytes_of(dtype));
    check_pointer(out, op, "out", bytes_of(dtype));
    const auto launch = [&](auto type) {
        using Word = typename decltype(type)::type;
        const int64_t words = columns * bytes_of(dtype) / static_cast<int64_t>(sizeof(Word));
        const int64_t tiles = ceil_div(words, kMaxThreads);
        SUROGATE_REQUIRE(tiles <= 65535, op, "columns must be less, got " + std::to_string(columns));
        const dim3 grid(to_int(n_tokens, op, "n_tokens"), static_cast<unsigned>(tiles));
        const auto threads = static_cast<unsigned>(ceil_div(ceil_div(words, tiles), 32) * 32);
        embedding_kernel<<<grid, threads, 0, stream>>>(static_cast<const int32_t*>(tokens), static_cast<const Word*>(w),
                                                       static_cast<Word*>(out), vocab_size, words);
    };
    if (columns * bytes_of(dtype) % 16 == 0 && all_aligned({w, out})) {
        launch(Type<uint4>{});
    } else if (dtype == FP32) {
        launch(Type<uint32_t>{});
    } else {
        launch(Type<uint16_t>{});
    }
    check_launch(op);
}

}  // namespace surogate
