// Attention in bf16 by cuDNN: causal within each document, H query heads that share G key/value heads.
// attention_plain.cu documents the formulas and layouts. Queries, keys and values are strided views of qkv. Scores and
// sums are fp32, the weights (p) and score gradients (ds) bf16; each output is rounded once.
//
// Documents of equal lengths (AttentionShape::dense) take cuDNN's dense graphs. Other documents are described by ragged
// offsets in elements, which the kernel `ragged_offsets` writes to the workspace at each launch.
//
// A ragged graph is built for a maximum number of documents and a maximum length. Its cost grows with both, even if
// documents are empty: every (document, head, tile of the maximum length) has a thread block, which may exit
// immediately. So the number of documents should be the smallest bound that the batches allow.
//
// Plans are shared: all layers of a model use one plan per direction, built when the first layer is bound.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "attention.h"
#include "cudnn_graph.h"
#include "cudnn_library.h"
#include "surogate/check.h"
#include "surogate/workspace.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // the library in which the frontend looks up cuDNN's functions
}

namespace surogate {
namespace {

constexpr int64_t bf16_bytes = 2;

// Returns the address of an element of a bf16 tensor, as the non-const pointer that the frontend expects.
void* at(const void* tensor, int64_t elements) {
    return const_cast<char*>(static_cast<const char*>(tensor)) + elements * bf16_bytes;
}

// Limits the bytes of score gradients that the frontend may store on SM90, while a graph is built (-1: no limit, 0:
// none). The frontend has no other interface that selects its ordered route. Changes the environment of the process, so
// hold plan_mutex.
//
// Other threads may read the environment meanwhile, for example in libraries that another rank initializes. Replacing
// the value of a variable is safe for them; adding or removing a variable moves the others. So the variable is added
// when this module is loaded, before there are threads of ranks, and never removed.
class ScoreBytesLimit {
public:
    explicit ScoreBytesLimit(const char* bytes) {
        const char* before = std::getenv(name);
        before_ = before == nullptr ? "-1" : before;
        setenv(name, bytes, /*overwrite=*/1);
    }
    ~ScoreBytesLimit() { setenv(name, before_.c_str(), /*overwrite=*/1); }
    ScoreBytesLimit(const ScoreBytesLimit&) = delete;
    ScoreBytesLimit& operator=(const ScoreBytesLimit&) = delete;

    static constexpr auto name = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT";

private:
    std::string before_;
};

[[maybe_unused]] const int limit_exists = setenv(ScoreBytesLimit::name, "-1", /*overwrite=*/0);

}  // namespace

size_t cudnn_version() {
    fe::cudnn_dlhandle = cudnn();
    return fe::detail::get_backend_version();
}

// ------------------------------------------------------------------------------------------------------------ forward

struct CudnnAttention::Plan {
    static constexpr auto op = "attention";

    explicit Plan(const AttentionShape& given) : shape(given), graph(given, op) {
        const int64_t row = graph.row(), out_row = shape.heads * shape.head_dim;
        const Tensor q = graph.input(Q, "q", shape.heads, row);
        const Tensor k = graph.input(K, "k", shape.kv_heads, row);
        const Tensor v = graph.input(V, "v", shape.kv_heads, row);
        auto [out, statistics] =
            graph.graph().sdpa(q, k, v, graph.node<fe::graph::SDPA_attributes>().set_generate_stats(true));
        graph.set_output(out, O, "out", shape.heads, out_row);
        graph.set_statistics(*statistics, shape.heads, shape.seq_len, shape.tokens);
        statistics->set_output(true);
        graph.build(0);
    }

    AttentionShape shape;
    AttentionGraph graph;
};

CudnnAttention::CudnnAttention(const AttentionShape& shape)
    : plan_(shared_plan<Plan>(shape, {}, Plan::op, [&] { return std::make_shared<Plan>(shape); })) {}
CudnnAttention::~CudnnAttention() = default;

int64_t CudnnAttention::workspace_bytes() const { return plan_->graph.workspace_bytes(); }

void CudnnAttention::run(const void* qkv, const void* cu_seqlens, void* out, void* lse, void* workspace,
                         cudaStream_t stream) const {
    check_pointer(qkv, Plan::op, "qkv", 16);
    check_pointer(out, Plan::op, "out", 16);
    check_pointer(lse, Plan::op, "lse", 16);
    const AttentionShape& shape = plan_->shape;
    const int64_t keys = shape.heads * shape.head_dim, values = keys + shape.kv_heads * shape.head_dim;
    plan_->graph.begin(cu_seqlens, 0, workspace, stream);
    plan_->graph.execute({{Q, at(qkv, 0)}, {K, at(qkv, keys)}, {V, at(qkv, values)}, {O, out}, {STATS, lse}},
                         workspace);
}

// ----------------------------------------------------------------------------------------------------------- backward

// The plan is for one chunk of tokens and one group of heads: views of the columns of the group, with the strides of whole rows. Each group is
// one execution of four to six kernels, which access only the heads of the group. So groups add launches (about 5 us
// per kernel) but no memory traffic. A group of one key/value head still has a thread block for every document, query
// head and tile of 64 or 128 keys.
//
// Chunks add the same launches, and `ragged_offsets`. Documents of other chunks are empty, and their thread blocks exit
// immediately.
//
// cuDNN before 9.26 reads the lse of a dense graph only as [documents, heads, seq_len]. `pack_lse` copies it to the
// workspace in this layout, unless the micro-batch is one document. It moves 8 bytes per token and head, about 2 us per launch.
//
// For ragged documents cuDNN sums dq in fp32 with the row stride of dq, and finds the sums of a document by its offset in
// q. In groups that would be the row of qkv for each, so q of a group is copied to packed rows, and dq written to others.
// Packed dq beside q in place puts sums of later documents outside of the workspace (9.19).
//
// Workspace of the caller: packed dk, packed dv, packed q, packed dq, packed lse; each may be absent.
struct CudnnAttentionBackward::Plan {
    static constexpr auto op = "attention_bwd";

    Plan(const AttentionShape& given, BackwardRoute route, int64_t group_count, bool pack_dkv, bool pack_dq,
         int64_t chunk_count)
        : shape(of_chunk(given, chunk_count)),
          tokens(given.tokens),
          groups(group_count),
          packed_dkv(pack_dkv),
          packed_dq(pack_dq),
          packed_lse(given.dense() && given.documents > 1),
          graph(shape, op) {
        SUROGATE_REQUIRE(groups > 0 && shape.kv_heads % groups == 0, op,
                         std::to_string(shape.kv_heads) + " kv_heads cannot be divided into " + std::to_string(groups) +
                             " groups");
        const ScoreBytesLimit limit(route == BackwardRoute::kept_scores ? "-1" : "0");
        const int64_t kv_heads = shape.kv_heads / groups;
        const int64_t row = graph.row(), out_row = shape.heads * shape.head_dim;
        heads = shape.heads / groups;
        columns = heads * shape.head_dim;
        kv_columns = kv_heads * shape.head_dim;
        const int64_t dkv_row = packed_dkv ? kv_columns : row, q_row = packed_dq ? columns : row;
        const Tensor q = graph.input(Q, "q", heads, q_row);
        const Tensor k = graph.input(K, "k", kv_heads, row);
        const Tensor v = graph.input(V, "v", kv_heads, row);
        const Tensor out = graph.input(O, "out", heads, out_row);
        const Tensor dout = graph.input(DO, "dout", heads, out_row);
        TensorAttributes statistics;
        statistics.set_name("lse");
        const int64_t lse_row = shape.dense() ? shape.seq_len : tokens;
        graph.set_statistics(statistics, heads, heads * lse_row, lse_row);
        const Tensor lse = graph.graph().tensor(statistics);

        const auto node = graph.node<fe::graph::SDPA_backward_attributes>().set_deterministic_algorithm(
            route != BackwardRoute::any_order);
        auto [dq, dk, dv] = graph.graph().sdpa_backward(q, k, v, out, dout, lse, node);
        graph.set_output(dq, DQ, "dq", heads, q_row);
        graph.set_output(dk, DK, "dk", kv_heads, dkv_row);
        graph.set_output(dv, DV, "dv", kv_heads, dkv_row);
        dkv_bytes = packed_dkv ? aligned(shape.tokens * kv_columns * bf16_bytes) : 0;
        q_bytes = packed_dq ? aligned(shape.tokens * columns * bf16_bytes) : 0;
        graph.build(2 * (dkv_bytes + q_bytes) + (packed_lse ? shape.tokens * heads * static_cast<int64_t>(sizeof(float)) : 0));
    }

    // Returns the shape of a chunk. Of documents of different lengths, any number may be in one chunk.
    static AttentionShape of_chunk(AttentionShape shape, int64_t chunks) {
        SUROGATE_REQUIRE(chunks > 0 && shape.tokens % chunks == 0, op,
                         std::to_string(shape.tokens) + " tokens cannot be divided into " + std::to_string(chunks) +
                             " chunks");
        if (shape.dense()) {
            SUROGATE_REQUIRE(shape.documents % chunks == 0, op,
                             std::to_string(shape.documents) + " documents of equal lengths cannot be divided into " +
                                 std::to_string(chunks) + " chunks");
            shape.documents /= chunks;
        }
        shape.tokens /= chunks;
        return shape;
    }

    AttentionShape shape;  // of a chunk
    int64_t tokens;        // of all chunks
    int64_t groups;
    bool packed_dkv;
    bool packed_dq;
    bool packed_lse;
    int64_t heads = 0;       // query heads per group
    int64_t columns = 0;     // columns of q, and of dq, per group
    int64_t kv_columns = 0;  // columns of dk, and of dv, per group
    int64_t dkv_bytes = 0;   // bytes of packed dk, and of packed dv, per group
    int64_t q_bytes = 0;     // bytes of packed q, and of packed dq, per group
    AttentionGraph graph;
};

CudnnAttentionBackward::CudnnAttentionBackward(const AttentionShape& shape, BackwardRoute route, int64_t groups,
                                               bool packed_dkv, bool packed_dq, int64_t chunks)
    : plan_(shared_plan<Plan>(shape, {static_cast<int64_t>(route), groups, packed_dkv, packed_dq, chunks}, Plan::op,
                              [&] { return std::make_shared<Plan>(shape, route, groups, packed_dkv, packed_dq, chunks); })) {}
CudnnAttentionBackward::~CudnnAttentionBackward() = default;

int64_t CudnnAttentionBackward::workspace_bytes() const { return plan_->graph.workspace_bytes(); }

void CudnnAttentionBackward::run(const void* dout, const void* qkv, const void* out, const void* lse,
                                 const void* cu_seqlens, void* dqkv, void* workspace, cudaStream_t stream) const {
    const Plan& plan = *plan_;
    check_pointer(dout, Plan::op, "dout", 16);
    check_pointer(qkv, Plan::op, "qkv", 16);
    check_pointer(out, Plan::op, "out", 16);
    check_pointer(lse, Plan::op, "lse", 16);
    check_pointer(dqkv, Plan::op, "dqkv", 16);
    const AttentionShape& shape = plan.shape;
    const int64_t columns = plan.columns, all_columns = plan.graph.row();
    char* packed_dk = plan.graph.extra(workspace);
    char* packed_dv = packed_dk + plan.dkv_bytes;
    char* packed_q = packed_dv + plan.dkv_bytes;
    char* packed_dq = packed_q + plan.q_bytes;
    char* packed_lse = packed_dq + plan.q_bytes;
    for (int64_t first = 0; first < plan.tokens; first += shape.tokens) {
        plan.graph.begin(cu_seqlens, first, workspace, stream);
        const int64_t row = first * plan.graph.row(), out_row = first * shape.heads * shape.head_dim;
        for (int64_t group = 0; group < plan.groups; ++group) {
            const int64_t out_query = out_row + group * columns;
            const int64_t query = row + group * columns;
            const int64_t key = row + shape.heads * shape.head_dim + group * plan.kv_columns;
            const int64_t value = key + shape.kv_heads * shape.head_dim;
            const float* group_lse = static_cast<const float*>(lse) + group * plan.heads * plan.tokens + first;
            if (plan.packed_lse) {
                pack_lse(group_lse, packed_lse, shape.documents, plan.heads, shape.seq_len, plan.tokens, stream);
            }
            void* read_lse = plan.packed_lse ? packed_lse : static_cast<void*>(const_cast<float*>(group_lse));
            if (plan.packed_dq) {
                const ColumnCopy copy{at(qkv, query), all_columns, packed_q, columns, columns};
                copy_columns(&copy, 1, shape.tokens, stream);
            }
            plan.graph.execute({{Q, plan.packed_dq ? packed_q : at(qkv, query)},
                                {K, at(qkv, key)},
                                {V, at(qkv, value)},
                                {O, at(out, out_query)},
                                {DO, at(dout, out_query)},
                                {STATS, read_lse},
                                {DQ, plan.packed_dq ? packed_dq : at(dqkv, query)},
                                {DK, plan.packed_dkv ? packed_dk : at(dqkv, key)},
                                {DV, plan.packed_dkv ? packed_dv : at(dqkv, value)}},
                               workspace);
            ColumnCopy copies[max_column_copies];
            int64_t count = 0;
            if (plan.packed_dkv) {
                copies[count++] = {packed_dk, plan.kv_columns, at(dqkv, key), all_columns, plan.kv_columns};
                copies[count++] = {packed_dv, plan.kv_columns, at(dqkv, value), all_columns, plan.kv_columns};
            }
            if (plan.packed_dq) {
                copies[count++] = {packed_dq, columns, at(dqkv, query), all_columns, columns};
            }
            if (count > 0) {
                copy_columns(copies, count, shape.tokens, stream);
            }
        }
    }
}

}  // namespace surogate
