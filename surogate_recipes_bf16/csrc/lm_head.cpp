// LM head with cross-entropy, and its gradients: the logits of one chunk of rows at a time.
//
//   logits  = x_c w^T                                    rounded to the dtype of x     [rows, ld]
//   dlogits = (softmax(logits) - onehot) * loss_scale    rounded, in place
//   dx_c    = dlogits w                                  rounded once
//   dw     += dlogits^T x_c                              fp32 over all chunks; the first one writes unless it is added to
//   loss  (+)= loss_scale * sum over labelled rows of -log softmax(logits)[target]
//
// The chunks are tokens / chunks rows each. Rows without a label get dlogits of zero, hence dx of zero. A bf16 dw is
// written by the product itself if one bf16 product makes it; else it is summed in fp32 in the workspace and rounded
// once at the end.
//
// Workspace: cuBLASLt's scratch | logits of a chunk, rows padded to a multiple of 64 elements | row losses fp32 [tokens] |
// dw fp32 [vocab_size, d_model], where it is summed there. Each part begins at a multiple of 256 bytes.
//
// FLOP: 6 tokens d_model vocab_size with gradients, 2 without. Launches: 4 a chunk (2 without gradients), and 1 or 2.

#include <vector>

#include "elementwise.h"
#include "gemm.h"
#include "loss.h"
#include "surogate/check.h"
#include "surogate/dtype.h"

namespace surogate {
namespace {

constexpr const char* op_name = "lm_head_ce";

struct Layout {
    int64_t rows;  // of a chunk
    int64_t ld;    // elements of a padded row of logits
    bool is_dw_staged;
    int64_t logits, row_loss, dw, total;  // offsets and size of the workspace in bytes
};

Layout layout_of(const LmHeadShape& s) {
    check_positive(s.tokens, op_name, "tokens");
    check_positive(s.d_model, op_name, "d_model");
    check_positive(s.vocab_size, op_name, "vocab_size");
    check_positive(s.chunks, op_name, "chunks");
    SUROGATE_REQUIRE(s.tokens % s.chunks == 0, op_name,
                     std::to_string(s.chunks) + " chunks do not divide " + std::to_string(s.tokens) + " tokens");
    SUROGATE_REQUIRE(s.dtype == BF16 || s.dtype == FP32, op_name, std::string("dtype cannot be ") + name_of(s.dtype));
    SUROGATE_REQUIRE(s.library_bytes >= 0 && s.library_bytes % 256 == 0, op_name,
                     "library_bytes must be a multiple of 256");
    if (s.has_grads) {
        SUROGATE_REQUIRE(s.dtype_dw == BF16 || s.dtype_dw == FP32, op_name,
                         std::string("dtype_dw cannot be ") + name_of(s.dtype_dw));
        SUROGATE_REQUIRE(!s.accumulate_dw || s.dtype_dw == FP32, op_name, "adding to dw needs fp32");
    }
    Layout l{};
    l.rows = s.tokens / s.chunks;
    l.ld = round_up(s.vocab_size, 64);
    l.is_dw_staged = s.has_grads && s.dtype_dw == BF16 && (s.chunks > 1 || s.dtype == FP32);
    l.logits = s.library_bytes;
    l.row_loss = l.logits + round_up(l.rows * l.ld * bytes_of(s.dtype), 256);
    l.dw = l.row_loss + round_up(s.tokens * 4, 256);
    l.total = l.dw + (l.is_dw_staged ? round_up(s.vocab_size * s.d_model * 4, 256) : 0);
    return l;
}

const void* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
void* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

void check_buffers(const LmHeadShape& s, const LmHeadBuffers& b) {
    check_pointer(b.x, op_name, "x", 256);
    check_pointer(b.w, op_name, "w", 256);
    check_pointer(b.targets, op_name, "targets", 4);
    check_pointer(b.loss_scale, op_name, "loss_scale", 4);
    check_pointer(b.loss, op_name, "loss", 4);
    check_pointer(b.workspace, op_name, "workspace", 256);
    if (s.has_grads) {
        check_pointer(b.dx, op_name, "dx", 256);
        check_pointer(b.dw, op_name, "dw", 256);
    }
}

}  // namespace

struct LmHead::Impl {
    LmHeadShape shape;
    Layout layout;
    std::unique_ptr<Gemm> logits, dx, dw_first, dw_next;  // null where not needed

    Impl(const LmHeadShape& s, const LmHeadBuffers& buffers, cudaStream_t stream) : shape(s), layout(layout_of(s)) {
        check_buffers(s, buffers);
        void* logits_buffer = at(buffers.workspace, layout.logits);
        const int64_t chunk_alignment = s.chunks == 1 ? 256 : alignment_of(static_cast<uintptr_t>(chunk_bytes()));

        GemmShape product = of(layout.rows, s.vocab_size, s.d_model, s.dtype);
        product.trans_b = true;
        product.ldd = layout.ld;
        product.alignment_a = chunk_alignment;
        logits = std::make_unique<Gemm>(product, timed_on(buffers, buffers.x, buffers.w, logits_buffer), stream);
        if (!s.has_grads) {
            return;
        }
        product = of(layout.rows, s.d_model, s.vocab_size, s.dtype);
        product.lda = layout.ld;
        product.alignment_d = chunk_alignment;
        dx = std::make_unique<Gemm>(product, timed_on(buffers, logits_buffer, buffers.w, buffers.dx), stream);

        product = of(s.vocab_size, s.d_model, layout.rows, layout.is_dw_staged ? FP32 : s.dtype_dw);
        product.trans_a = true;
        product.lda = layout.ld;
        product.alignment_b = chunk_alignment;
        product.accumulate = s.accumulate_dw;
        const GemmBuffers on = timed_on(buffers, logits_buffer, buffers.x, dw_sum(buffers));
        dw_first = std::make_unique<Gemm>(product, on, stream);
        if (s.chunks > 1) {
            product.accumulate = true;
            dw_next = std::make_unique<Gemm>(product, on, stream);
        }
    }

    int64_t chunk_bytes() const { return layout.rows * shape.d_model * bytes_of(shape.dtype); }

    // Where the products for dw go.
    void* dw_sum(const LmHeadBuffers& b) const { return layout.is_dw_staged ? at(b.workspace, layout.dw) : b.dw; }

    GemmShape of(int64_t m, int64_t n, int64_t k, int dtype_d) const {
        GemmShape product{};
        product.m = m;
        product.n = n;
        product.k = k;
        product.dtype_ab = shape.dtype;
        product.dtype_d = dtype_d;
        product.library_bytes = shape.library_bytes;
        product.alignment_a = product.alignment_b = product.alignment_d = 256;
        return product;
    }

    static GemmBuffers timed_on(const LmHeadBuffers& buffers, const void* a, const void* b, void* d) {
        return {a, b, d, nullptr, buffers.workspace};
    }

    void run(const LmHeadBuffers& b, cudaStream_t stream) {
        check_buffers(shape, b);
        void* logits_buffer = at(b.workspace, layout.logits);
        void* row_loss = at(b.workspace, layout.row_loss);
        for (int64_t chunk = 0; chunk < shape.chunks; ++chunk) {
            const void* x = at(b.x, chunk * chunk_bytes());
            const void* targets = at(b.targets, chunk * layout.rows * 4);
            void* losses = at(row_loss, chunk * layout.rows * 4);
            logits->run(x, b.w, logits_buffer, nullptr, b.workspace, stream);
            if (!shape.has_grads) {
                cross_entropy(logits_buffer, targets, losses, layout.rows, shape.vocab_size, layout.ld, shape.dtype,
                              stream);
                continue;
            }
            cross_entropy_grads(logits_buffer, targets, b.loss_scale, losses, layout.rows, shape.vocab_size, layout.ld,
                                shape.dtype, stream);
            dx->run(logits_buffer, b.w, at(b.dx, chunk * chunk_bytes()), nullptr, b.workspace, stream);
            Gemm& dw = chunk == 0 ? *dw_first : *dw_next;
            dw.run(logits_buffer, x, dw_sum(b), nullptr, b.workspace, stream);
        }
        sum_loss(row_loss, b.loss_scale, b.loss, shape.tokens, shape.accumulate_loss, stream);
        if (layout.is_dw_staged) {
            cast(dw_sum(b), b.dw, shape.vocab_size * shape.d_model, false, FP32, BF16, stream);
        }
    }
};

LmHead::LmHead(const LmHeadShape& shape, const LmHeadBuffers& buffers, cudaStream_t stream)
    : impl_(std::make_unique<Impl>(shape, buffers, stream)) {}

LmHead::~LmHead() = default;

void LmHead::run(const LmHeadBuffers& buffers, cudaStream_t stream) { impl_->run(buffers, stream); }

std::string LmHead::describe() const {
    std::string text;
    for (const Gemm* gemm : {impl_->logits.get(), impl_->dx.get(), impl_->dw_first.get(), impl_->dw_next.get()}) {
        if (gemm != nullptr) {
            text += (text.empty() ? "" : "\n") + gemm->describe();
        }
    }
    return text;
}

int64_t LmHead::workspace_bytes(const LmHeadShape& shape) { return layout_of(shape).total; }

}  // namespace surogate
