// The products of an LM head. Only labelled rows are processed, in chunks whose logits fit in the workspace.
//
//   rows    = indices of the labelled rows, ascending; chunk i begins at the (i * tokens / chunks)-th of them
//   x_c     = x[rows of the chunk]                       0 after the last labelled row
//   logits  = x_c w^T                                    [rows of a chunk, ld], rounded to the dtype of x
//   dlogits                                              by the caller, in place of the logits, rounded
//   dx[rows] = dlogits w                                 rounded once; 0 for unlabelled rows
//   dw     (+)= dlogits^T x_c                            fp32 sum over the chunks; the first chunk writes unless dw is
//                                                        accumulated into; omitted if w is frozen
//
// With fp8, the operands are quantized by the caller: x_c and w in E4M3, dlogits in E5M2, each with one scale. dw reads
// dlogits and x_c transposed.
//
// The host knows the number of labels in a micro-batch, so the only cost of unlabelled rows is clearing their dx. A bf16
// dw is written directly if a single bf16 product computes it; otherwise it is summed in fp32 in the workspace and
// rounded once at the end.
//
// Workspace: cuBLASLt workspace | logits of a chunk, row stride a multiple of 64 elements | rows and labels int32
// [tokens] | x_c | dx_c, if there is dx | dw fp32 [vocab_size, d_model], if it is summed there. Each part begins at a
// multiple of 256 bytes. With fp8 also: x_c in E4M3 | 256 bytes of scales | if there is dw,
// x_c in E4M3 and dlogits in E5M2, transposed.
//
// FLOPs: 2 * labels * d_model * vocab_size for each of logits, dx and dw. Launches: 1 or 2 in begin; 2 per chunk for the
// logits, 2 for dx, 1 for dw; 0 or 1 in end. Gather and scatter move 4 to 6 bytes per element of x, which is negligible
// compared with 6 * vocab_size FLOPs per element.

#include "surogate/lm_head.h"

#include <utility>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/gemm.h"
#include "surogate/workspace.h"

namespace surogate {
namespace {

struct Layout {
    int64_t rows;       // rows of a chunk
    int64_t ld;         // row stride of the logits in elements
    bool is_dw_staged;  // dw is summed in the workspace
    // offsets in the workspace and its size, in bytes
    int64_t logits, row_index, labels, x, dx, dw, x_codes, scales, x_codes_t, gradient_codes_t, total;
};

constexpr int64_t gradient_scale = 64, measured = 128;  // offsets from the scale of x

void check_fp8(const char* op, const HeadShape& s) {
    SUROGATE_REQUIRE(s.dtype == BF16, op, std::string("with fp8, dtype must be bf16, got ") + name_of(s.dtype));
    for (const auto& [size, name] : {std::pair(s.d_model, "d_model"), std::pair(s.vocab_size, "vocab_size"),
                                     std::pair(s.tokens / s.chunks, "rows of a chunk")}) {
        SUROGATE_REQUIRE(size % 16 == 0, op,
                         std::string("with fp8, ") + name + " must be a multiple of 16, got " + std::to_string(size));
    }
}

Layout layout_of(const char* op, const HeadShape& s) {
    check_positive(s.tokens, op, "tokens");
    check_positive(s.d_model, op, "d_model");
    check_positive(s.vocab_size, op, "vocab_size");
    check_positive(s.chunks, op, "chunks");
    SUROGATE_REQUIRE(s.tokens % s.chunks == 0, op,
                     std::to_string(s.tokens) + " tokens cannot be split into " + std::to_string(s.chunks) +
                         " equal chunks");
    SUROGATE_REQUIRE(s.dtype == BF16 || s.dtype == FP32, op,
                     std::string("dtype must be fp32 or bf16, got ") + name_of(s.dtype));
    SUROGATE_REQUIRE(s.library_bytes >= 0 && s.library_bytes % workspace_alignment == 0, op,
                     "library_bytes must be a multiple of 256");
    SUROGATE_REQUIRE(s.has_dx || !s.has_dw, op, "dw cannot be computed without dx");
    if (s.has_dw) {
        SUROGATE_REQUIRE(s.dtype_dw == BF16 || s.dtype_dw == FP32, op,
                         std::string("dtype_dw must be fp32 or bf16, got ") + name_of(s.dtype_dw));
        SUROGATE_REQUIRE(!s.accumulate_dw || s.dtype_dw == FP32, op, "accumulating into dw requires fp32");
    }
    if (s.fp8) {
        check_fp8(op, s);
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
    l.x_codes = l.dw + (l.is_dw_staged ? aligned(s.vocab_size * s.d_model * 4) : 0);
    l.scales = l.x_codes + (s.fp8 ? aligned(l.rows * s.d_model) : 0);
    l.x_codes_t = l.scales + (s.fp8 ? workspace_alignment : 0);
    l.gradient_codes_t = l.x_codes_t + (s.fp8 && s.has_dw ? aligned(l.rows * s.d_model) : 0);
    l.total = l.gradient_codes_t + (s.fp8 && s.has_dw ? aligned(l.rows * s.vocab_size) : 0);
    return l;
}

void check_buffers(const char* op, const HeadShape& s, const HeadBuffers& b) {
    check_pointer(b.x, op, "x", workspace_alignment);
    check_pointer(b.w, op, "w", workspace_alignment);
    check_pointer(b.targets, op, "targets", 4);
    check_pointer(b.workspace, op, "workspace", workspace_alignment);
    if (s.has_dx) {
        check_pointer(b.dx, op, "dx", workspace_alignment);
    }
    if (s.has_dw) {
        check_pointer(b.dw, op, "dw", workspace_alignment);
    }
    if (s.fp8) {
        check_pointer(b.w_scale, op, "w_scale", 16);
        SUROGATE_REQUIRE(is_aligned(b.w_t, workspace_alignment), op, "w_t must be aligned to 256 bytes");
    }
}

}  // namespace

struct HeadProducts::Impl {
    const char* op;
    HeadShape shape;
    HeadBuffers b;
    Layout layout;
    std::unique_ptr<Gemm> logits, dx, dw_first, dw_next;  // null if not needed

    Impl(const char* name, const HeadShape& s, const HeadBuffers& buffers, cudaStream_t stream)
        : op(name), shape(s), b(buffers), layout(layout_of(name, s)) {
        check_buffers(op, s, b);
        const auto timed_on = [&](GemmBuffers on) {
            if (!s.timed) {
                on.a = on.b = on.d = nullptr;
            }
            return on;
        };
        GemmShape product = of(layout.rows, s.vocab_size, s.d_model, s.dtype);
        product.trans_b = true;
        product.ldd = layout.ld;
        if (s.fp8) {
            scaled(product, E4M3, s.fast);
        }
        logits = std::make_unique<Gemm>(product, timed_on(of_logits()), stream);
        if (!s.has_dx) {
            return;
        }
        product = of(layout.rows, s.d_model, s.vocab_size, s.dtype);
        product.lda = layout.ld;
        if (s.fp8) {
            scaled(product, E5M2, s.fast_dx);
            product.lda = 2 * layout.ld;
            product.trans_b = b.w_t != nullptr;
        }
        dx = std::make_unique<Gemm>(product, timed_on(of_dx()), stream);
        if (!s.has_dw) {
            return;
        }
        product = of(s.vocab_size, s.d_model, layout.rows, layout.is_dw_staged ? FP32 : s.dtype_dw);
        if (s.fp8) {
            scaled(product, E5M2, s.fast_dx);
            product.trans_b = true;
        } else {
            product.trans_a = true;
            product.lda = layout.ld;
        }
        product.accumulate = s.accumulate_dw;
        const GemmBuffers on = timed_on(of_dw());
        dw_first = std::make_unique<Gemm>(product, on, stream);
        if (s.chunks > 1) {
            product.accumulate = true;
            dw_next = std::make_unique<Gemm>(product, on, stream);
        }
    }

    void* at(int64_t bytes) const { return static_cast<char*>(b.workspace) + bytes; }

    void* row_index(int64_t chunk) const { return at(layout.row_index + chunk * layout.rows * 4); }

    int64_t row_bytes() const { return shape.d_model * bytes_of(shape.dtype); }

    // Destination of the dw products.
    void* dw_sum() const { return layout.is_dw_staged ? at(layout.dw) : b.dw; }

    GemmBuffers of_logits() const {
        GemmBuffers on{at(shape.fp8 ? layout.x_codes : layout.x), b.w, at(layout.logits), nullptr, b.workspace};
        if (shape.fp8) {
            on.scale_a = at(layout.scales);
            on.scale_b = b.w_scale;
        }
        return on;
    }

    GemmBuffers of_dx() const {
        GemmBuffers on{at(layout.logits), b.w, at(layout.dx), nullptr, b.workspace};
        if (shape.fp8) {
            on.b = b.w_t != nullptr ? b.w_t : b.w;
            on.scale_a = at(layout.scales + gradient_scale);
            on.scale_b = b.w_scale;
        }
        return on;
    }

    GemmBuffers of_dw() const {
        GemmBuffers on{at(layout.logits), at(layout.x), dw_sum(), nullptr, b.workspace};
        if (shape.fp8) {
            on.a = at(layout.gradient_codes_t);
            on.b = at(layout.x_codes_t);
            on.scale_a = at(layout.scales + gradient_scale);
            on.scale_b = at(layout.scales);
        }
        return on;
    }

    static void scaled(GemmShape& product, int dtype_a, bool fast) {
        product.dtype_a = dtype_a;
        product.dtype_b = E4M3;
        product.scaling = GemmScaling::Tensor;
        product.fast = fast;
    }

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
};

HeadProducts::HeadProducts(const char* op, const HeadShape& shape, const HeadBuffers& buffers, cudaStream_t stream)
    : impl_(std::make_unique<Impl>(op, shape, buffers, stream)) {}

HeadProducts::~HeadProducts() = default;

void HeadProducts::begin(cudaStream_t stream) {
    const Impl& p = *impl_;
    labelled_rows(p.b.targets, p.at(p.layout.row_index), p.at(p.layout.labels), p.shape.tokens, stream);
    if (p.shape.has_dx) {
        check_cuda(cudaMemsetAsync(p.b.dx, 0, p.shape.tokens * p.row_bytes(), stream), p.op);
    }
}

HeadChunk HeadProducts::gather(int64_t index, cudaStream_t stream) {
    const Impl& p = *impl_;
    SUROGATE_REQUIRE(0 <= index && index < p.shape.chunks, p.op, "there is no chunk " + std::to_string(index));
    HeadChunk chunk{p.at(p.layout.logits), p.row_index(index), p.at(p.layout.labels + index * p.layout.rows * 4),
                    p.layout.rows, p.layout.ld, p.at(p.layout.x)};
    if (p.shape.fp8) {
        chunk.x_codes = p.at(p.layout.x_codes);
        chunk.x_scale = p.at(p.layout.scales);
        chunk.measured = p.at(p.layout.scales + measured);
        chunk.gradient_scale = p.at(p.layout.scales + gradient_scale);
        if (p.shape.has_dw) {
            chunk.x_codes_t = p.at(p.layout.x_codes_t);
            chunk.gradient_codes_t = p.at(p.layout.gradient_codes_t);
        }
    }
    gather_rows(p.b.x, chunk.row_index, chunk.x, chunk.rows, p.row_bytes(), stream);
    return chunk;
}

void HeadProducts::multiply(cudaStream_t stream) { impl_->logits->run(impl_->of_logits(), stream); }

HeadChunk HeadProducts::logits(int64_t index, cudaStream_t stream) {
    const HeadChunk chunk = gather(index, stream);
    multiply(stream);
    return chunk;
}

void HeadProducts::gradients(int64_t index, cudaStream_t stream) {
    const Impl& p = *impl_;
    p.dx->run(p.of_dx(), stream);
    scatter_rows(p.at(p.layout.dx), p.row_index(index), p.b.dx, p.layout.rows, p.row_bytes(), stream);
    if (p.shape.has_dw) {
        Gemm& dw = index == 0 ? *p.dw_first : *p.dw_next;
        dw.run(p.of_dw(), stream);
    }
}

void HeadProducts::end(cudaStream_t stream) {
    const Impl& p = *impl_;
    if (p.layout.is_dw_staged) {
        round_sum(p.dw_sum(), p.b.dw, p.shape.vocab_size * p.shape.d_model, stream);
    }
}

std::string HeadProducts::describe() const {
    std::string text;
    for (const Gemm* gemm : {impl_->logits.get(), impl_->dx.get(), impl_->dw_first.get(), impl_->dw_next.get()}) {
        if (gemm != nullptr) {
            text += (text.empty() ? "" : "\n") + gemm->describe();
        }
    }
    return text;
}

int64_t HeadProducts::workspace_bytes(const char* op, const HeadShape& shape) { return layout_of(op, shape).total; }

}  // namespace surogate
