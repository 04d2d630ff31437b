// The LM head for losses of tokens: statistics of the logits of each label, and the gradients of x and w. Only labelled
// rows are processed, in chunks whose logits fit in the workspace.
//
//   rows, x_c, logits as in lm_head.cpp
//   forward   log_probs, logsumexp, mean of the rows (token_statistics); 0 for unlabelled rows
//   backward  dlogits in place of the logits (token_logit_grads), rounded
//             dx[rows] = dlogits w, rounded once; 0 for unlabelled rows
//             dw     (+)= dlogits^T x_c, fp32 sum over the chunks; the first chunk writes unless dw is accumulated into
//
// A run is begin, chunk 0, the further chunks that contain labelled rows, and end. A bf16 dw is written directly if a
// single bf16 product computes it; otherwise it is summed in fp32 in the workspace and rounded once at the end.
//
// Workspace: cuBLASLt workspace | logits of a chunk, row stride a multiple of 64 elements | rows and labels int32
// [tokens] | x_c | dx_c, if there is dx | dw fp32 [vocab_size, d_model], if it is summed there. Each part begins at a
// multiple of 256 bytes.
//
// FLOPs: 2 * labels * d_model * vocab_size for the logits, forward and backward, and for each of dx and dw.

#include "lm_head_tokens.h"

#include "elementwise.h"
#include "loss.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/gemm.h"
#include "surogate/workspace.h"

namespace surogate {
namespace {

constexpr const char* op_name = "lm_head_tokens";

struct Layout {
    int64_t rows;       // rows of a chunk
    int64_t ld;         // row stride of the logits in elements
    bool is_dw_staged;  // dw is summed in the workspace
    int64_t logits, row_index, labels, x, dx, dw, total;  // offsets in the workspace and its size, in bytes
};

Layout layout_of(const LmHeadTokensShape& s) {
    check_positive(s.tokens, op_name, "tokens");
    check_positive(s.d_model, op_name, "d_model");
    check_positive(s.vocab_size, op_name, "vocab_size");
    check_positive(s.chunks, op_name, "chunks");
    SUROGATE_REQUIRE(s.tokens % s.chunks == 0, op_name,
                     std::to_string(s.tokens) + " tokens cannot be split into " + std::to_string(s.chunks) +
                         " equal chunks");
    SUROGATE_REQUIRE(s.dtype == BF16 || s.dtype == FP32, op_name,
                     std::string("dtype must be fp32 or bf16, got ") + name_of(s.dtype));
    SUROGATE_REQUIRE(s.library_bytes >= 0 && s.library_bytes % workspace_alignment == 0, op_name,
                     "library_bytes must be a multiple of 256");
    SUROGATE_REQUIRE(s.has_dx || !s.has_dw, op_name, "dw cannot be computed without dx");
    if (s.has_dw) {
        SUROGATE_REQUIRE(s.dtype_dw == BF16 || s.dtype_dw == FP32, op_name,
                         std::string("dtype_dw must be fp32 or bf16, got ") + name_of(s.dtype_dw));
        SUROGATE_REQUIRE(!s.accumulate_dw || s.dtype_dw == FP32, op_name, "accumulating into dw requires fp32");
    }
    Layout l{};
    l.rows = s.tokens / s.chunks;
    l.ld = round_up(s.vocab_size, 64);
    l.is_dw_staged = s.has_dw && s.dtype_dw == BF16 && (s.chunks > 1 || s.dtype == FP32);
    l.logits = s.library_bytes;
    l.row_index = l.logits + aligned(l.rows * l.ld * bytes_of(s.dtype));
    const int64_t per_token = aligned(s.tokens * 4);
    const int64_t some_rows = aligned(l.rows * s.d_model * bytes_of(s.dtype));
    l.labels = l.row_index + per_token;
    l.x = l.labels + per_token;
    l.dx = l.x + some_rows;
    l.dw = l.dx + (s.has_dx ? some_rows : 0);
    l.total = l.dw + (l.is_dw_staged ? aligned(s.vocab_size * s.d_model * 4) : 0);
    return l;
}

void* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

void check_buffers(const LmHeadTokensShape& s, const LmHeadTokensBuffers& b) {
    check_pointer(b.x, op_name, "x", workspace_alignment);
    check_pointer(b.w, op_name, "w", workspace_alignment);
    check_pointer(b.targets, op_name, "targets", 4);
    check_pointer(b.log_probs, op_name, "log_probs", 4);
    check_pointer(b.logsumexp, op_name, "logsumexp", 4);
    check_pointer(b.mean, op_name, "mean", 4);
    check_pointer(b.workspace, op_name, "workspace", workspace_alignment);
    if (s.has_dx) {
        check_pointer(b.d_logsumexp, op_name, "d_logsumexp", 4);
        check_pointer(b.dx, op_name, "dx", workspace_alignment);
    }
    if (s.has_dw) {
        check_pointer(b.dw, op_name, "dw", workspace_alignment);
    }
}

}  // namespace

struct LmHeadTokens::Impl {
    LmHeadTokensShape shape;
    LmHeadTokensBuffers b;
    Layout layout;
    std::unique_ptr<Gemm> logits, dx, dw_first, dw_next;  // null if not needed

    Impl(const LmHeadTokensShape& s, const LmHeadTokensBuffers& buffers, cudaStream_t stream)
        : shape(s), b(buffers), layout(layout_of(s)) {
        check_buffers(s, b);
        const auto timed_on = [&](void* left, void* right, void* result) {
            return s.timed ? GemmBuffers{left, right, result, nullptr, b.workspace} : GemmBuffers{};
        };
        void* logits_buffer = at(b.workspace, layout.logits);
        void* x = at(b.workspace, layout.x);
        GemmShape product = of(layout.rows, s.vocab_size, s.d_model, s.dtype);
        product.trans_b = true;
        product.ldd = layout.ld;
        logits = std::make_unique<Gemm>(product, timed_on(x, b.w, logits_buffer), stream);
        if (!s.has_dx) {
            return;
        }
        product = of(layout.rows, s.d_model, s.vocab_size, s.dtype);
        product.lda = layout.ld;
        dx = std::make_unique<Gemm>(product, timed_on(logits_buffer, b.w, at(b.workspace, layout.dx)), stream);
        if (!s.has_dw) {
            return;
        }
        product = of(s.vocab_size, s.d_model, layout.rows, layout.is_dw_staged ? FP32 : s.dtype_dw);
        product.trans_a = true;
        product.lda = layout.ld;
        product.accumulate = s.accumulate_dw;
        const GemmBuffers on = timed_on(logits_buffer, x, dw_sum());
        dw_first = std::make_unique<Gemm>(product, on, stream);
        if (s.chunks > 1) {
            product.accumulate = true;
            dw_next = std::make_unique<Gemm>(product, on, stream);
        }
    }

    int64_t row_bytes() const { return shape.d_model * bytes_of(shape.dtype); }

    // Destination of the dw products.
    void* dw_sum() const { return layout.is_dw_staged ? at(b.workspace, layout.dw) : b.dw; }

    GemmShape of(int64_t m, int64_t n, int64_t k, int dtype_d) const {
        GemmShape product{};
        product.m = m;
        product.n = n;
        product.k = k;
        product.dtype_a = product.dtype_b = shape.dtype;
        product.dtype_d = dtype_d;
        product.library_bytes = shape.library_bytes;
        product.alignment_a = product.alignment_b = product.alignment_d = 256;
        return product;
    }

    void begin(cudaStream_t stream) {
        labelled_rows(b.targets, at(b.workspace, layout.row_index), at(b.workspace, layout.labels), shape.tokens,
                      stream);
        if (shape.has_dx) {
            check_cuda(cudaMemsetAsync(b.dx, 0, shape.tokens * row_bytes(), stream), op_name);
            return;
        }
        for (void* out : {b.log_probs, b.logsumexp, b.mean}) {
            check_cuda(cudaMemsetAsync(out, 0, shape.tokens * 4, stream), op_name);
        }
    }

    void chunk(int64_t index, cudaStream_t stream) {
        SUROGATE_REQUIRE(0 <= index && index < shape.chunks, op_name, "there is no chunk " + std::to_string(index));
        void* logits_buffer = at(b.workspace, layout.logits);
        void* x = at(b.workspace, layout.x);
        void* row_index = at(b.workspace, layout.row_index + index * layout.rows * 4);
        void* labels = at(b.workspace, layout.labels + index * layout.rows * 4);
        gather_rows(b.x, row_index, x, layout.rows, row_bytes(), stream);
        logits->run({x, b.w, logits_buffer, nullptr, b.workspace}, stream);
        if (!shape.has_dx) {
            token_statistics(logits_buffer, row_index, labels, b.log_probs, b.logsumexp, b.mean, layout.rows,
                             shape.vocab_size, layout.ld, shape.dtype, stream);
            return;
        }
        token_logit_grads(logits_buffer, row_index, labels, b.logsumexp, b.log_probs, b.d_logsumexp, b.mean,
                          layout.rows, shape.vocab_size, layout.ld, shape.dtype, stream);
        void* dx_rows = at(b.workspace, layout.dx);
        dx->run({logits_buffer, b.w, dx_rows, nullptr, b.workspace}, stream);
        scatter_rows(dx_rows, row_index, b.dx, layout.rows, row_bytes(), stream);
        if (shape.has_dw) {
            Gemm& dw = index == 0 ? *dw_first : *dw_next;
            dw.run({logits_buffer, x, dw_sum(), nullptr, b.workspace}, stream);
        }
    }

    void end(cudaStream_t stream) {
        if (layout.is_dw_staged) {
            cast(dw_sum(), b.dw, shape.vocab_size * shape.d_model, false, FP32, BF16, stream);
        }
    }
};

LmHeadTokens::LmHeadTokens(const LmHeadTokensShape& shape, const LmHeadTokensBuffers& buffers, cudaStream_t stream)
    : impl_(std::make_unique<Impl>(shape, buffers, stream)) {}

LmHeadTokens::~LmHeadTokens() = default;

void LmHeadTokens::begin(cudaStream_t stream) { impl_->begin(stream); }

void LmHeadTokens::chunk(int64_t index, cudaStream_t stream) { impl_->chunk(index, stream); }

void LmHeadTokens::end(cudaStream_t stream) { impl_->end(stream); }

int64_t LmHeadTokens::workspace_bytes(const LmHeadTokensShape& shape) { return layout_of(shape).total; }

}  // namespace surogate
