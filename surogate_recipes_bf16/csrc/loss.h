// LM head and cross-entropy. The kernels are described in cross_entropy.cu and labelled_rows.cu, the sequence in
// lm_head.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

namespace surogate {

void cross_entropy(const void* logits, const void* targets, void* row_loss, int64_t rows, int64_t vocab_size,
                   int64_t ld, int dtype, cudaStream_t stream);

void cross_entropy_grads(void* logits, const void* targets, const void* loss_scale, void* row_loss, int64_t rows,
                         int64_t vocab_size, int64_t ld, int dtype, cudaStream_t stream);

void sum_loss(const void* row_loss, const void* loss_scale, void* loss, int64_t rows, bool accumulate,
              cudaStream_t stream);

void labelled_rows(const void* targets, void* rows, void* labels, int64_t tokens, cudaStream_t stream);

void gather_rows(const void* x, const void* rows, void* out, int64_t count, int64_t row_bytes, cudaStream_t stream);

void scatter_rows(const void* in, const void* rows, void* x, int64_t count, int64_t row_bytes, cudaStream_t stream);

struct LmHeadShape {
    int64_t tokens, d_model, vocab_size, chunks;
    int dtype;             // of x, w, logits and dx: BF16 or FP32
    bool has_dx;
    bool has_dw;           // not without dx
    int dtype_dw;          // FP32 or BF16, where there is a dw
    bool accumulate_loss;  // loss +=
    bool accumulate_dw;    // dw +=, fp32 only
    int64_t library_bytes; // scratch that cuBLASLt may use, a multiple of 256
    bool timed;            // the clock chooses the algorithms of the products; else the library's first choices are taken
};

struct LmHeadBuffers {
    const void* x;           // [tokens, d_model]
    const void* w;           // [vocab_size, d_model]
    const void* targets;     // int32 [tokens]; negative: no label
    const void* loss_scale;  // fp32 []
    void* loss;              // fp32 []
    void* dx;                // [tokens, d_model]; null without has_dx
    void* dw;                // [vocab_size, d_model]; null without has_dw
    void* workspace;         // LmHead::workspace_bytes(shape)
};

// Made once, when the op is bound, for these buffers: times its products on them, after which dx, dw and the workspace
// hold rubbish. x, w, dx, dw and the workspace are aligned to 256 bytes. For one thread at a time.
class LmHead {
public:
    LmHead(const LmHeadShape& shape, const LmHeadBuffers& buffers, cudaStream_t stream);
    ~LmHead();
    LmHead(const LmHead&) = delete;
    LmHead& operator=(const LmHead&) = delete;

    // A run is begin, then chunks 0, 1, ... as far as there are labels (chunk 0 always), then end.
    void begin(cudaStream_t stream);
    void chunk(int64_t index, cudaStream_t stream);
    void end(cudaStream_t stream);
    std::string describe() const;  // one line per product

    static int64_t workspace_bytes(const LmHeadShape& shape);

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace surogate
