// Launchers of causal attention over packed documents: plain ones for every dtype (attention_plain.cu, which tells what
// they compute and every layout) and cuDNN's for bf16 (attention_cudnn.cpp).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace surogate {

void attention_plain(const void* qkv, const void* cu_seqlens, void* out, void* lse, int64_t tokens, int64_t documents,
                     int64_t heads, int64_t kv_heads, int64_t head_dim, int dtype, cudaStream_t stream);

// Bytes that `workspace` of the backward points to: delta, fp32 [H, T].
int64_t attention_plain_bwd_workspace(int64_t tokens, int64_t heads);

void attention_plain_bwd(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens,
                         void* dqkv, void* workspace, int64_t tokens, int64_t documents, int64_t heads,
                         int64_t kv_heads, int64_t head_dim, int dtype, cudaStream_t stream);

// Where the documents begin in tensors of which a token takes elements[i] elements, and how long they are.
//   cu_seqlens   [documents + 1] int32
//   lengths      [documents] int32:               cu_seqlens[d + 1] - cu_seqlens[d]
//   offsets      [count, documents + 1] int64:    cu_seqlens[d] * elements[i]; count is at most 4
constexpr int max_ragged_tensors = 4;
void ragged_offsets(const void* cu_seqlens, void* lengths, void* offsets, int64_t documents, const int64_t* elements,
                    int64_t count, cudaStream_t stream);

// What a plan of cuDNN is made for.
struct AttentionShape {
    int64_t tokens;
    int64_t documents;  // length of cu_seqlens - 1: empty documents cost launches of thread blocks that end at once
    int64_t seq_len;    // no document is longer
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
};

// major * 10000 + minor * 100 + patch of the cuDNN that is loaded; loads it.
size_t cudnn_version();

// cuDNN's forward for bf16. Making one loads cuDNN and compiles: seconds. Bound to the device that is current.
class CudnnAttention {
public:
    explicit CudnnAttention(const AttentionShape& shape);
    ~CudnnAttention();
    int64_t workspace_bytes() const;
    // lse comes out as fp32 [H, T]. workspace: aligned to 256 bytes.
    void run(const void* qkv, const void* cu_seqlens, void* out, void* lse, void* workspace, cudaStream_t stream) const;

private:
    struct Plan;
    std::shared_ptr<const Plan> plan_;
};

// How cuDNN's backward adds up dq. kernels/attention_route.py has the same codes and chooses.
enum class BackwardRoute : int64_t {
    any_order = 0,    // blocks add as they finish: bits may differ from run to run
    kept_scores = 1,  // the gradients of all scores stay in workspace and dq is one product of them: the same bits.
                      // SM90; documents * heads * seq_len^2 elements of bf16, for one group of heads at a time
    ordered = 2,      // blocks add in a fixed order: the same bits. SM90 from cuDNN 9.25 on, SM100 and later
};

// cuDNN's backward for bf16. SM8x and SM12x have none.
//   groups         of key/value heads with their query heads that run one after the other, by one plan and in one
//                  workspace; divides kv_heads
//   packed_dkv     dk and dv go to workspace [T, G / groups, D] and are copied into dqkv. The sums over a group that
//                  cuDNN keeps take the row width of dk and dv, times H / G: with packed rows they are a fraction.
class CudnnAttentionBackward {
public:
    CudnnAttentionBackward(const AttentionShape& shape, BackwardRoute route, int64_t groups, bool packed_dkv);
    ~CudnnAttentionBackward();
    int64_t workspace_bytes() const;
    void run(const void* dout, const void* qkv, const void* out, const void* lse, const void* cu_seqlens, void* dqkv,
             void* workspace, cudaStream_t stream) const;

private:
    struct Plan;
    std::shared_ptr<const Plan> plan_;
};

}  // namespace surogate
