// Attention in bf16 by cuDNN: causal within each document, H query heads that share G key/value heads.
// attention_plain.cu documents the formulas and layouts. Queries, keys and values are strided views of qkv. Documents
// are described by ragged offsets in elements, which the kernel `ragged_offsets` writes to the workspace at each
// launch. Scores and sums are fp32, the weights (p) and score gradients (ds) bf16; each output is rounded once.
//
// A cuDNN graph is built for a maximum number of documents and a maximum length. Its cost grows with both, even if
// documents are empty: every (document, head, tile of the maximum length) has a thread block, which may exit
// immediately. So the number of documents should be the smallest bound that the batches allow.
//
// This is the only file that includes the cuDNN frontend. It takes a minute and 2 GB of memory to compile.
// Plans are shared: all layers of a model use one plan per direction, built when the first layer is bound.
//
// Source of the rules for graphs: the SDPA documentation of the frontend, github.com/NVIDIA/cudnn-frontend.

#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "attention.h"
#include "library.h"
#include "surogate/check.h"
#include "workspace.h"

namespace fe = cudnn_frontend;

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // the library in which the frontend looks up cuDNN's functions
}

namespace surogate {
namespace {

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using Numbers = std::vector<int64_t>;

// Tensor identifiers for the frontend.
enum Id : int64_t {
    Q = 1,
    K,
    V,
    O,
    DO,
    STATS,
    DQ,
    DK,
    DV,
    LENGTHS,
    QKV_OFFSETS,
    OUT_OFFSETS,
    STATS_OFFSETS,
    DKV_OFFSETS
};

constexpr int64_t bf16_bytes = 2;


void check(fe::error_t error, const char* op, const char* step) {
    if (error.is_bad()) {
        throw std::runtime_error(std::string(op) + ": cuDNN " + fe::detail::get_backend_version_string() + ", " + step +
                                 ": " + error.get_message());
    }
}

// Returns the handle of the current device. Each device is driven by one thread. Handles live until the process ends,
// because plans may live as long.
cudnnHandle_t handle_of_device(const char* op) {
    static std::mutex mutex;
    static std::map<int, cudnnHandle_t>& handles = *new std::map<int, cudnnHandle_t>;
    const std::lock_guard<std::mutex> lock(mutex);
    fe::cudnn_dlhandle = cudnn();
    int device = 0;
    check_cuda(cudaGetDevice(&device), op);
    const auto found = handles.find(device);
    if (found != handles.end()) {
        return found->second;
    }
    cudnnHandle_t handle = nullptr;
    const cudnnStatus_t status = fe::detail::create_handle(&handle);
    if (status != CUDNN_STATUS_SUCCESS) {
        throw std::runtime_error(std::string(op) + ": cudnnCreate: " + fe::detail::get_error_string(status));
    }
    return handles[device] = handle;
}

void check_shape(const AttentionShape& shape, const char* op) {
    check_positive(shape.tokens, op, "tokens");
    check_positive(shape.documents, op, "documents");
    check_positive(shape.heads, op, "heads");
    check_positive(shape.kv_heads, op, "kv_heads");
    SUROGATE_REQUIRE(shape.seq_len > 1, op, "seq_len must be at least 2, got " + std::to_string(shape.seq_len));
    SUROGATE_REQUIRE(shape.heads % shape.kv_heads == 0, op,
                     std::to_string(shape.heads) + " heads cannot share " + std::to_string(shape.kv_heads) +
                         " kv_heads evenly");
    SUROGATE_REQUIRE(shape.head_dim > 0 && shape.head_dim % 16 == 0 && shape.head_dim <= 128, op,
                     "head_dim must be a multiple of 16 up to 128, got " + std::to_string(shape.head_dim));
}

// Serializes the construction of all plans of the process, of both directions and on all devices. Ranks bind their
// kernels in parallel threads, and a backward plan changes an environment variable that the frontend reads while it
// builds a plan (ScoreBytesLimit).
std::mutex& plan_mutex() {
    static std::mutex mutex;
    return mutex;
}

// Returns the plan for a shape on the current device. Calls `make` unless such a plan is in use.
template <class Plan, class Make>
std::shared_ptr<const Plan> shared_plan(const AttentionShape& shape, const Numbers& options, const char* op,
                                        Make make) {
    static std::map<Numbers, std::weak_ptr<const Plan>> plans;  // guarded by plan_mutex
    int device = 0;
    check_cuda(cudaGetDevice(&device), op);
    Numbers key{device,      shape.tokens,   shape.documents, shape.seq_len,
                shape.heads, shape.kv_heads, shape.head_dim};
    key.insert(key.end(), options.begin(), options.end());
    const std::lock_guard<std::mutex> lock(plan_mutex());
    if (std::shared_ptr<const Plan> plan = plans[key].lock()) {
        return plan;
    }
    std::shared_ptr<const Plan> plan = make();
    plans[key] = plan;
    return plan;
}

// A cuDNN graph over ragged documents, with the parts common to forward and backward.
//
// Workspace: lengths [documents] int32, offsets [tensors, documents + 1] int64, `extra` bytes, cuDNN's workspace.
class RaggedGraph {
public:
    RaggedGraph(const AttentionShape& shape, const char* op) : shape_(shape), op_(op) {
        check_shape(shape, op);
        handle_ = handle_of_device(op);
        graph_.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        lengths_ = graph_.tensor(fe::graph::Tensor_attributes()
                                     .set_name("lengths")
                                     .set_uid(LENGTHS)
                                     .set_dim({shape.documents, 1, 1, 1})
                                     .set_stride({1, 1, 1, 1})
                                     .set_data_type(fe::DataType_t::INT32));
    }

    fe::graph::Graph& graph() { return graph_; }
    const Tensor& lengths() const { return lengths_; }
    int64_t row() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }
    float scale() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim))); }

    // Declares the offsets of the documents in tensors with `elements` elements per token.
    Tensor offsets(Id id, const char* name, int64_t elements) {
        offset_ids_.push_back(id);
        elements_.push_back(elements);
        return graph_.tensor(fe::graph::Tensor_attributes()
                                 .set_name(name)
                                 .set_uid(id)
                                 .set_dim({shape_.documents + 1, 1, 1, 1})
                                 .set_stride({1, 1, 1, 1})
                                 .set_data_type(fe::DataType_t::INT64));
    }

    // Returns the attributes of a tensor [tokens, heads, head_dim] with a token stride of `row` elements.
    fe::graph::Tensor_attributes attributes(Id id, const char* name, int64_t heads, int64_t row,
                                            const Tensor& offsets) const {
        fe::graph::Tensor_attributes result;
        result.set_name(name)
            .set_uid(id)
            .set_dim({shape_.documents, heads, shape_.seq_len, shape_.head_dim})
            .set_stride({shape_.seq_len * row, shape_.head_dim, row, 1});
        result.set_ragged_offset(offsets);
        return result;
    }

    // Sets the attributes of `heads` rows of lse [H, T]. The statistics of a head are contiguous over all documents.
    void set_statistics(fe::graph::Tensor_attributes& statistics, int64_t heads, const Tensor& offsets) const {
        statistics.set_uid(STATS)
            .set_dim({shape_.documents, heads, shape_.seq_len, 1})
            .set_stride({heads * shape_.tokens, shape_.tokens, 1, 1})
            .set_data_type(fe::DataType_t::FLOAT);
        statistics.set_ragged_offset(offsets);
    }

    // Builds the execution plan. `extra` is the number of workspace bytes reserved for the caller.
    void build(int64_t extra) {
        check(graph_.validate(), op_, "validate");
        check(graph_.build_operation_graph(handle_), op_, "build_operation_graph");
        check(graph_.create_execution_plans({fe::HeurMode_t::A}), op_, "create_execution_plans");
        check(graph_.check_support(), op_, "check_support");
        check(graph_.build_plans(), op_, "build_plans");
        int64_t bytes = 0;
        check(graph_.get_workspace_size(bytes), op_, "get_workspace_size");
        lengths_bytes_ = aligned(shape_.documents * static_cast<int64_t>(sizeof(int32_t)));
        offsets_bytes_ = aligned(static_cast<int64_t>(elements_.size()) * (shape_.documents + 1) *
                                 static_cast<int64_t>(sizeof(int64_t)));
        extra_bytes_ = aligned(extra);
        workspace_bytes_ = lengths_bytes_ + offsets_bytes_ + extra_bytes_ + aligned(bytes);
    }

    int64_t workspace_bytes() const { return workspace_bytes_; }
    char* extra(void* workspace) const { return static_cast<char*>(workspace) + lengths_bytes_ + offsets_bytes_; }

    // Writes lengths and offsets of the documents to the workspace. Call it once before `execute`.
    void begin(const void* cu_seqlens, void* workspace, cudaStream_t stream) const {
        check_pointer(workspace, op_, "workspace", workspace_alignment);
        char* lengths = static_cast<char*>(workspace);
        ragged_offsets(cu_seqlens, lengths, lengths + lengths_bytes_, shape_.documents, elements_.data(),
                       static_cast<int64_t>(elements_.size()), stream);
        const cudnnStatus_t status = fe::detail::set_stream(handle_, stream);
        if (status != CUDNN_STATUS_SUCCESS) {
            throw std::runtime_error(std::string(op_) + ": cudnnSetStream: " + fe::detail::get_error_string(status));
        }
    }

    // Enqueues the graph on the stream of `begin`.
    void execute(std::unordered_map<int64_t, void*> pointers, void* workspace) const {
        char* lengths = static_cast<char*>(workspace);
        pointers[LENGTHS] = lengths;
        for (size_t i = 0; i < offset_ids_.size(); ++i) {
            pointers[offset_ids_[i]] = lengths + lengths_bytes_ + static_cast<int64_t>(i) * (shape_.documents + 1) * 8;
        }
        check(graph_.execute(handle_, pointers, extra(workspace) + extra_bytes_), op_, "execute");
    }

private:
    AttentionShape shape_;
    const char* op_;
    cudnnHandle_t handle_ = nullptr;
    fe::graph::Graph graph_;
    Tensor lengths_;
    std::vector<int64_t> offset_ids_;
    std::vector<int64_t> elements_;
    int64_t lengths_bytes_ = 0;
    int64_t offsets_bytes_ = 0;
    int64_t extra_bytes_ = 0;
    int64_t workspace_bytes_ = 0;
};

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

    explicit Plan(const AttentionShape& given) : shape(given), ragged(given, op) {
        auto& graph = ragged.graph();
        const int64_t row = ragged.row(), out_row = shape.heads * shape.head_dim;
        const Tensor qkv_offsets = ragged.offsets(QKV_OFFSETS, "qkv_offsets", row);
        const Tensor out_offsets = ragged.offsets(OUT_OFFSETS, "out_offsets", out_row);
        const Tensor stats_offsets = ragged.offsets(STATS_OFFSETS, "stats_offsets", 1);
        const Tensor q = graph.tensor(ragged.attributes(Q, "q", shape.heads, row, qkv_offsets));
        const Tensor k = graph.tensor(ragged.attributes(K, "k", shape.kv_heads, row, qkv_offsets));
        const Tensor v = graph.tensor(ragged.attributes(V, "v", shape.kv_heads, row, qkv_offsets));

        auto [out, statistics] = graph.sdpa(q, k, v,
                                            fe::graph::SDPA_attributes()
                                                .set_name(op)
                                                .set_generate_stats(true)
                                                .set_attn_scale(ragged.scale())
                                                .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                                                .set_diagonal_band_right_bound(0)
                                                .set_padding_mask(true)
                                                .set_seq_len_q(ragged.lengths())
                                                .set_seq_len_kv(ragged.lengths()));
        *out = ragged.attributes(O, "out", shape.heads, out_row, out_offsets);
        out->set_output(true).set_data_type(fe::DataType_t::BFLOAT16);
        ragged.set_statistics(*statistics, shape.heads, stats_offsets);
        statistics->set_output(true);
        ragged.build(0);
    }

    AttentionShape shape;
    RaggedGraph ragged;
};

CudnnAttention::CudnnAttention(const AttentionShape& shape)
    : plan_(shared_plan<Plan>(shape, {}, Plan::op, [&] { return std::make_shared<Plan>(shape); })) {}
CudnnAttention::~CudnnAttention() = default;

int64_t CudnnAttention::workspace_bytes() const { return plan_->ragged.workspace_bytes(); }

void CudnnAttention::run(const void* qkv, const void* cu_seqlens, void* out, void* lse, void* workspace,
                         cudaStream_t stream) const {
    check_pointer(qkv, Plan::op, "qkv", 16);
    check_pointer(out, Plan::op, "out", 16);
    check_pointer(lse, Plan::op, "lse", 16);
    const AttentionShape& shape = plan_->shape;
    const int64_t keys = shape.heads * shape.head_dim, values = keys + shape.kv_heads * shape.head_dim;
    plan_->ragged.begin(cu_seqlens, workspace, stream);
    plan_->ragged.execute({{Q, at(qkv, 0)}, {K, at(qkv, keys)}, {V, at(qkv, values)}, {O, out}, {STATS, lse}},
                          workspace);
}

// ----------------------------------------------------------------------------------------------------------- backward

// The plan is for one group of heads: views of the columns of the group, with the strides of whole rows. Each group is
// one execution of four to six kernels, which access only the heads of the group. So groups add launches (about 5 us
// per kernel) but no memory traffic. A group of one key/value head still has a thread block for every document, query
// head and tile of 64 or 128 keys.
struct CudnnAttentionBackward::Plan {
    static constexpr auto op = "attention_bwd";

    Plan(const AttentionShape& given, BackwardRoute route, int64_t group_count, bool pack)
        : shape(given), groups(group_count), packed_dkv(pack), ragged(given, op) {
        SUROGATE_REQUIRE(groups > 0 && shape.kv_heads % groups == 0, op,
                         std::to_string(shape.kv_heads) + " kv_heads cannot be divided into " + std::to_string(groups) +
                             " groups");
        const ScoreBytesLimit limit(route == BackwardRoute::kept_scores ? "-1" : "0");
        auto& graph = ragged.graph();
        const int64_t heads = shape.heads / groups, kv_heads = shape.kv_heads / groups;
        const int64_t row = ragged.row(), out_row = shape.heads * shape.head_dim;
        kv_columns = kv_heads * shape.head_dim;
        const int64_t dkv_row = packed_dkv ? kv_columns : row;
        const Tensor qkv_offsets = ragged.offsets(QKV_OFFSETS, "qkv_offsets", row);
        const Tensor out_offsets = ragged.offsets(OUT_OFFSETS, "out_offsets", out_row);
        const Tensor stats_offsets = ragged.offsets(STATS_OFFSETS, "stats_offsets", 1);
        const Tensor dkv_offsets = packed_dkv ? ragged.offsets(DKV_OFFSETS, "dkv_offsets", kv_columns) : qkv_offsets;
        const Tensor q = graph.tensor(ragged.attributes(Q, "q", heads, row, qkv_offsets));
        const Tensor k = graph.tensor(ragged.attributes(K, "k", kv_heads, row, qkv_offsets));
        const Tensor v = graph.tensor(ragged.attributes(V, "v", kv_heads, row, qkv_offsets));
        const Tensor out = graph.tensor(ragged.attributes(O, "out", heads, out_row, out_offsets));
        const Tensor dout = graph.tensor(ragged.attributes(DO, "dout", heads, out_row, out_offsets));
        fe::graph::Tensor_attributes statistics;
        statistics.set_name("lse");
        ragged.set_statistics(statistics, heads, stats_offsets);
        const Tensor lse = graph.tensor(statistics);

        auto attributes = fe::graph::SDPA_backward_attributes()
                              .set_name(op)
                              .set_attn_scale(ragged.scale())
                              .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                              .set_diagonal_band_right_bound(0)
                              .set_padding_mask(true)
                              .set_seq_len_q(ragged.lengths())
                              .set_seq_len_kv(ragged.lengths())
                              .set_max_total_seq_len_q(shape.tokens)
                              .set_max_total_seq_len_kv(shape.tokens)
                              .set_deterministic_algorithm(route != BackwardRoute::any_order);
        auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, lse, attributes);
        *dq = ragged.attributes(DQ, "dq", heads, row, qkv_offsets);
        *dk = ragged.attributes(DK, "dk", kv_heads, dkv_row, dkv_offsets);
        *dv = ragged.attributes(DV, "dv", kv_heads, dkv_row, dkv_offsets);
        for (const Tensor& gradient : {dq, dk, dv}) {
            gradient->set_output(true).set_data_type(fe::DataType_t::BFLOAT16);
        }
        packed_bytes = packed_dkv ? aligned(shape.tokens * kv_columns * bf16_bytes) : 0;
        ragged.build(2 * packed_bytes);
    }

    // Copies the packed rows of a group into its columns of dqkv.
    void unpack(void* columns, const void* packed, cudaStream_t stream) const {
        const size_t row = static_cast<size_t>(ragged.row() * bf16_bytes);
        const size_t width = static_cast<size_t>(kv_columns * bf16_bytes);
        check_cuda(cudaMemcpy2DAsync(columns, row, packed, width, width, static_cast<size_t>(shape.tokens),
                                     cudaMemcpyDeviceToDevice, stream),
                   op);
    }

    AttentionShape shape;
    int64_t groups;
    bool packed_dkv;
    int64_t kv_columns = 0;    // columns of dk, and of dv, per group
    int64_t packed_bytes = 0;  // bytes of packed dk, and of packed dv, per group
    RaggedGraph ragged;
};

CudnnAttentionBackward::CudnnAttentionBackward(const AttentionShape& shape, BackwardRoute route, int64_t groups,
                                               bool packed_dkv)
    : plan_(shared_plan<Plan>(shape, {static_cast<int64_t>(route), groups, packed_dkv}, Plan::op,
                              [&] { return std::make_shared<Plan>(shape, route, groups, packed_dkv); })) {}
CudnnAttentionBackward::~CudnnAttentionBackward() = default;

int64_t CudnnAttentionBackward::workspace_bytes() const { return plan_->ragged.workspace_bytes(); }

void CudnnAttentionBackward::run(const void* dout, const void* qkv, const void* out, const void* lse,
                                 const void* cu_seqlens, void* dqkv, void* workspace, cudaStream_t stream) const {
    const Plan& plan = *plan_;
    check_pointer(dout, Plan::op, "dout", 16);
    check_pointer(qkv, Plan::op, "qkv", 16);
    check_pointer(out, Plan::op, "out", 16);
    check_pointer(lse, Plan::op, "lse", 16);
    check_pointer(dqkv, Plan::op, "dqkv", 16);
    plan.ragged.begin(cu_seqlens, workspace, stream);
    const AttentionShape& shape = plan.shape;
    const int64_t heads = shape.heads / plan.groups, columns = heads * shape.head_dim;
    char* packed_dk = plan.ragged.extra(workspace);
    char* packed_dv = packed_dk + plan.packed_bytes;
    for (int64_t group = 0; group < plan.groups; ++group) {
        const int64_t query = group * columns;
        const int64_t key = shape.heads * shape.head_dim + group * plan.kv_columns;
        const int64_t value = key + shape.kv_heads * shape.head_dim;
        const float* statistics = static_cast<const float*>(lse) + group * heads * shape.tokens;
        plan.ragged.execute({{Q, at(qkv, query)},
                             {K, at(qkv, key)},
                             {V, at(qkv, value)},
                             {O, at(out, query)},
                             {DO, at(dout, query)},
                             {STATS, const_cast<float*>(statistics)},
                             {DQ, at(dqkv, query)},
                             {DK, plan.packed_dkv ? packed_dk : at(dqkv, key)},
                             {DV, plan.packed_dkv ? packed_dv : at(dqkv, value)}},
                            workspace);
        if (plan.packed_dkv) {
            plan.unpack(at(dqkv, key), packed_dk, stream);
            plan.unpack(at(dqkv, value), packed_dv, stream);
        }
    }
}

}  // namespace surogate
