// What LM heads share: their products over labelled rows, in chunks whose logits fit in the workspace, and the moves of
// these rows: `surogate_add_kernels(my_package USES lm_head)`. csrc/lm_head/ documents the kernels, head_products.cpp the
// sequence of launches. `bind_chunks` (bind.h) binds a head.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

namespace surogate {

// Writes the indices of the labelled rows and their labels.
void labelled_rows(const void* targets, void* rows, void* labels, int64_t tokens, cudaStream_t stream);

void gather_rows(const void* x, const void* rows, void* out, int64_t count, int64_t row_bytes, cudaStream_t stream);

void scatter_rows(const void* in, const void* rows, void* x, int64_t count, int64_t row_bytes, cudaStream_t stream);

// Rounds fp32 to bf16.
void round_sum(const void* sum, void* out, int64_t size, cudaStream_t stream);

void sum_loss(const void* row_loss, const void* loss_scale, void* loss, int64_t rows, bool accumulate,
              cudaStream_t stream);

// Whether the current device has clusters that hold a row of bf16 logits (cross_entropy_cluster.cuh).
bool cluster_holds_row(int64_t vocab_size);

struct HeadShape {
    int64_t tokens, d_model, vocab_size, chunks;
    int dtype;              // dtype of x, w, logits and dx: BF16 or FP32
    bool has_dx;
    bool has_dw;            // requires has_dx
    int dtype_dw;           // FP32 or BF16; ignored without has_dw
    bool accumulate_dw;     // dw +=, fp32 only
    int64_t library_bytes;  // workspace of cuBLASLt, a multiple of 256
    bool timed;             // algorithms of the products are chosen by timing; otherwise by cuBLASLt's heuristic
    bool fp8 = false;       // products of FP8 operands (head_products.cpp)
    bool fast = false, fast_dx = false;  // with fp8: sums of the logits, and of the gradients, may have fewer bits (gemm.h)
};

struct HeadBuffers {
    const void* x;        // [tokens, d_model]
    void* w;              // [vocab_size, d_model], in E4M3 with fp8; only timing writes to it
    const void* targets;  // int32 [tokens]; negative: no label
    void* dx;             // [tokens, d_model]; null without has_dx
    void* dw;             // [vocab_size, d_model]; null without has_dw
    void* workspace;      // HeadProducts::workspace_bytes
    void* w_t = nullptr;      // with fp8: w transposed, or null where the GPU multiplies any layout
    void* w_scale = nullptr;  // with fp8: fp32 (decode, encode) of w
};

// The parts of the workspace that a chunk has: its logits, and lists of its rows.
struct HeadChunk {
    void* logits;     // [rows, ld], where there is a label
    void* row_index;  // int32 [rows], the token of each row
    void* labels;     // int32 [rows]; negative after the last labelled row
    int64_t rows, ld;
    void* x;          // [rows, d_model]
    // With fp8. Scales are fp32 (decode, encode), each aligned to 16 bytes; decode multiplies products.
    void* x_codes;            // E4M3 [rows, d_model]
    void* x_scale;
    void* measured;           // 8 bytes that the op which finds this scale uses
    void* gradient_scale;
    void* x_codes_t;          // [d_model, rows], for dw; null without
    void* gradient_codes_t;   // E5M2 [vocab_size, rows], for dw; null without
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
    // gradients once the gradient of the logits has taken their place, then end. With fp8 it calls gather and multiply in
    // place of logits, writes the codes of x and x_scale between them, and before gradients gradient_scale and the codes of
    // the gradient: E5M2 in place of the logits, with a row stride of 2 ld, and transposed.
    void begin(cudaStream_t stream);
    HeadChunk logits(int64_t index, cudaStream_t stream);
    HeadChunk gather(int64_t index, cudaStream_t stream);
    void multiply(cudaStream_t stream);  // of the rows that were gathered last
    void gradients(int64_t index, cudaStream_t stream);
    void end(cudaStream_t stream);
    std::string describe() const;  // one line per product

    // A multiple of 256.
    static int64_t workspace_bytes(const char* op, const HeadShape& shape);

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

struct LossHeadShape {
    HeadShape head;
    float softcap;         // of the logits; 0: none
    bool accumulate_loss;  // loss +=
};

struct LossHeadBuffers {
    HeadBuffers head;        // with a workspace of LossHead::workspace_bytes
    const void* loss_scale;  // fp32 []
    void* loss;              // fp32 []
};

// What heads with cross-entropy share: loss (+)= loss_scale * sum of the losses of the rows, which `chunk` of a head writes.
// Constructed as HeadProducts. A run calls begin, then chunk 0 and every further chunk that contains labels, in order,
// then end. Workspace: that of HeadProducts | losses fp32 [tokens]. Launches: 1 in begin, 1 in end.
class LossHead {
public:
    void begin(cudaStream_t stream);
    void end(cudaStream_t stream);
    std::string describe() const { return products_.describe(); }

    static int64_t workspace_bytes(const char* op, const HeadShape& shape);

protected:
    LossHead(const char* op, const LossHeadShape& shape, const LossHeadBuffers& buffers, cudaStream_t stream);
    void* row_loss(int64_t index) const;  // fp32 [rows] of a chunk

    LossHeadShape shape_;
    LossHeadBuffers b_;
    HeadProducts products_;

private:
    char* row_loss_;
};

}  // namespace surogate
