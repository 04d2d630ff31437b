// The products of an LM head over labelled rows, in chunks whose logits fit in the workspace: what LmHead and
// LmHeadTokens share. head_products.cpp documents the sequence.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

namespace surogate {

struct HeadShape {
    int64_t tokens, d_model, vocab_size, chunks;
    int dtype;              // dtype of x, w, logits and dx: BF16 or FP32
    bool has_dx;
    bool has_dw;            // requires has_dx
    int dtype_dw;           // FP32 or BF16; ignored without has_dw
    bool accumulate_dw;     // dw +=, fp32 only
    int64_t library_bytes;  // workspace of cuBLASLt, a multiple of 256
    bool timed;             // algorithms of the products are chosen by timing; otherwise by cuBLASLt's heuristic
};

struct HeadBuffers {
    const void* x;        // [tokens, d_model]
    void* w;              // [vocab_size, d_model]; only timing writes to it
    const void* targets;  // int32 [tokens]; negative: no label
    void* dx;             // [tokens, d_model]; null without has_dx
    void* dw;             // [vocab_size, d_model]; null without has_dw
    void* workspace;      // HeadProducts::workspace_bytes
};

// The logits of a chunk in the workspace, and lists of its rows.
struct HeadChunk {
    void* logits;     // [rows, ld], where there is a label
    void* row_index;  // int32 [rows], the token of each row
    void* labels;     // int32 [rows]; negative after the last labelled row
    int64_t rows, ld;
};

// Constructed once, when the op is bound to its buffers. The constructor times the products on these buffers and leaves
// undefined contents in w, dw and the workspace. x, w, dx, dw and the workspace must be aligned to 256 bytes. Errors
// name the op `op`. Not thread-safe.
class HeadProducts {
public:
    HeadProducts(const char* op, const HeadShape& shape, const HeadBuffers& buffers, cudaStream_t stream);
    ~HeadProducts();
    HeadProducts(const HeadProducts&) = delete;
    HeadProducts& operator=(const HeadProducts&) = delete;

    // A run calls begin, then for chunk 0 and every further chunk that contains labels, in order, logits and, with dx,
    // gradients once the gradient of the logits has taken their place, then end.
    void begin(cudaStream_t stream);
    HeadChunk logits(int64_t index, cudaStream_t stream);
    void gradients(int64_t index, cudaStream_t stream);
    void end(cudaStream_t stream);
    std::string describe() const;  // one line per product

    // A multiple of 256.
    static int64_t workspace_bytes(const char* op, const HeadShape& shape);

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace surogate
