// Launchers of causal attention over packed documents: plain kernels for fp32 (attention_plain.cu, which documents formulas
// and layouts), tensor cores for bf16 (attention_mma.cu), and cuDNN for bf16 (attention_cudnn.cpp).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace surogate {

// window: the number of keys that a query sees at most, 0: all up to its own. softcap: 0: none.
void attention_plain(const void* qkv, const void* cu_seqlens, void* out, void* lse, int64_t tokens, int64_t documents,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, double scale, double softcap,
                     cudaStream_t stream);
void attention_mma(const void* qkv, const void* cu_seqlens, void* out, void* lse, int64_t tokens, int64_t documents,
                   int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, double scale, double softcap,
                   cudaStream_t stream);

// workspace: rowsum(dout out) and lse, both corrected, fp32 [H, tokens / chunks] each. own: whether out and lse are those of
// attention; only then their rounding is corrected. dlse: the gradient of lse, fp32 [H, tokens], or null. chunks: as in CudnnAttentionBackward.
void attention_plain_bwd(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens,
                         const void* dlse, void* dqkv, void* workspace, int64_t tokens, int64_t documents, int64_t heads,
                         int64_t kv_heads, int64_t head_dim, int64_t window, double scale, double softcap, bool own,
                         int64_t chunks, cudaStream_t stream);
void attention_mma_bwd(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens,
                       const void* dlse, void* dqkv, void* workspace, int64_t tokens, int64_t documents, int64_t heads, int64_t kv_heads,
                       int64_t head_dim, int64_t window, double scale, double softcap, bool own, int64_t chunks,
                       cudaStream_t stream);

// Computes the lengths of the documents in the tokens [first, first + tokens), and their offsets in tensors that begin
// at token `first` and have elements[i] elements per token. Documents outside of these tokens are empty.
//   cu_seqlens   [documents + 1] int32
//   lengths      [documents] int32:               start(d + 1) - start(d)
//   offsets      [count, documents + 1] int64:    start(d) * elements[i]; count is at most 5
// where start(d) = clamp(cu_seqlens[d] - first, 0, tokens)
constexpr int max_ragged_tensors = 5;
void ragged_offsets(const void* cu_seqlens, void* lengths, void* offsets, int64_t documents, int64_t first,
                    int64_t tokens, const int64_t* elements, int64_t count, cudaStream_t stream);

// Copies the first documents * seq_len columns of lse [heads, row] to packed [documents, heads, seq_len], both fp32.
void pack_lse(const void* lse, void* packed, int64_t documents, int64_t heads, int64_t seq_len, int64_t row,
              cudaStream_t stream);

// Copies columns of bf16 tensors [tokens, columns], between these addresses and strides in elements, in one launch. At
// most max_column_copies.
struct ColumnCopy {
    const void* from;
    int64_t from_row;
    void* to;
    int64_t to_row;
    int64_t columns;
};
constexpr int max_column_copies = 3;
void copy_columns(const ColumnCopy* copies, int64_t count, int64_t tokens, cudaStream_t stream);

// Sizes that a cuDNN plan is built for.
struct AttentionShape {
    int64_t tokens;
    int64_t documents;  // length of cu_seqlens - 1; empty documents cost thread blocks that exit immediately
    int64_t seq_len;    // maximum length of a document
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t window;  // the number of keys that a query sees at most, 0: all up to its own
    double scale;

    // Returns whether every document has seq_len tokens. This follows from the sizes, since documents cover all tokens
    // and none is longer than seq_len.
    bool dense() const { return documents * seq_len == tokens; }
};

// Loads cuDNN and returns its version: major * 10000 + minor * 100 + patch.
size_t cudnn_version();

// Forward attention in bf16 by cuDNN. The constructor loads cuDNN and compiles a plan, which takes seconds. The plan is
// for the current device.
class CudnnAttention {
public:
    explicit CudnnAttention(const AttentionShape& shape);
    ~CudnnAttention();
    int64_t workspace_bytes() const;
    // Writes out and lse (fp32 [H, T]). The workspace must be aligned to 256 bytes.
    void run(const void* qkv, const void* cu_seqlens, void* out, void* lse, void* workspace, cudaStream_t stream) const;

private:
    struct Plan;
    std::shared_ptr<const Plan> plan_;
};

// How cuDNN's backward accumulates dq. kernels/attention_route.py has the same codes and selects one.
enum class BackwardRoute : int64_t {
    any_order = 0,    // blocks accumulate as they finish: results may differ in their last bits from run to run
    kept_scores = 1,  // the gradients of all scores are stored in the workspace and dq is a product of them:
                      // deterministic. SM90; documents * heads * seq_len^2 bf16 elements, for one group at a time
    ordered = 2,      // blocks accumulate in a fixed order: deterministic. SM90 with cuDNN 9.25 or later, SM100
};

// Backward attention in bf16 by cuDNN, by the lse and out that are given: p = exp(s - lse), ds = p (dp - rowsum(dout out)).
// Not available on SM8x and SM12x.
//   groups         number of groups of key/value heads (with their query heads) that run one after another, with one
//                  plan and one workspace; divides kv_heads
//   packed_dkv     dk and dv are written to workspace [T, G / groups, D] and then copied into dqkv. The sums per query
//                  head that cuDNN keeps for ragged documents have the row stride of dk and dv, times H / G; packed
//                  rows make them smaller.
//   packed_dq      queries are copied to workspace [T, H / groups, D], dq is written to another and then copied into
//                  dqkv. The sums that cuDNN keeps for ragged documents have the row stride of dq, and are found by the
//                  offsets of q.
//   chunks         number of chunks of tokens that run one after another, with one plan and one workspace; divides the
//                  tokens, and no document may cross the boundary of a chunk
class CudnnAttentionBackward {
public:
    CudnnAttentionBackward(const AttentionShape& shape, BackwardRoute route, int64_t groups, bool packed_dkv,
                           bool packed_dq, int64_t chunks);
    ~CudnnAttentionBackward();
    int64_t workspace_bytes() const;
    void run(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens, void* dqkv,
             void* workspace, cudaStream_t stream) const;

private:
    struct Plan;
    std::shared_ptr<const Plan> plan_;
};

}  // namespace surogate
