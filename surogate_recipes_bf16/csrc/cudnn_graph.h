// cuDNN graphs of attention: handles, shapes, documents and plans, which forward and backward share.
//
// Only attention_cudnn.cpp includes this file. The cuDNN frontend takes half a minute and 1 GB of memory to compile.
//
// Source of the rules for graphs: the SDPA documentation of the frontend, github.com/NVIDIA/cudnn-frontend.
#pragma once

#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention.h"
#include "cudnn_library.h"
#include "surogate/check.h"
#include "surogate/workspace.h"

namespace surogate {

namespace fe = cudnn_frontend;

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using TensorAttributes = fe::graph::Tensor_attributes;
using Numbers = std::vector<int64_t>;
using Pointers = std::unordered_map<int64_t, void*>;

// Tensor identifiers for the frontend. Those of offsets follow FIRST_OFFSETS.
enum Id : int64_t { Q = 1, K, V, O, DO, STATS, DQ, DK, DV, LENGTHS, FIRST_OFFSETS };

inline void check(fe::error_t error, const char* op, const char* step) {
    if (error.is_bad()) {
        throw std::runtime_error(std::string(op) + ": cuDNN " + fe::detail::get_backend_version_string() + ", " + step +
                                 ": " + error.get_message());
    }
}

inline void check(cudnnStatus_t status, const char* op, const char* function) {
    if (status != CUDNN_STATUS_SUCCESS) {
        throw std::runtime_error(std::string(op) + ": " + function + ": " + fe::detail::get_error_string(status));
    }
}

// Returns the handle of this thread for the current device. A handle has one stream, and several threads may drive a
// device. Handles live until the process ends, because plans may live as long.
inline cudnnHandle_t handle_of_device(const char* op) {
    static std::mutex mutex;
    thread_local std::map<int, cudnnHandle_t>& handles = *new std::map<int, cudnnHandle_t>;
    const std::lock_guard<std::mutex> lock(mutex);
    fe::cudnn_dlhandle = cudnn();
    int device = 0;
    check_cuda(cudaGetDevice(&device), op);
    const auto found = handles.find(device);
    if (found != handles.end()) {
        return found->second;
    }
    cudnnHandle_t handle = nullptr;
    check(fe::detail::create_handle(&handle), op, "cudnnCreate");
    return handles[device] = handle;
}

inline void check_shape(const AttentionShape& shape, const char* op) {
    check_positive(shape.tokens, op, "tokens");
    check_positive(shape.documents, op, "documents");
    check_positive(shape.heads, op, "heads");
    check_positive(shape.kv_heads, op, "kv_heads");
    SUROGATE_REQUIRE(shape.seq_len > 1, op, "seq_len must be at least 2, got " + std::to_string(shape.seq_len));
    SUROGATE_REQUIRE(shape.window >= 0, op, "window must not be negative, got " + std::to_string(shape.window));
    SUROGATE_REQUIRE(shape.scale > 0, op, "scale must be positive, got " + std::to_string(shape.scale));
    SUROGATE_REQUIRE(shape.heads % shape.kv_heads == 0, op,
                     std::to_string(shape.heads) + " heads cannot share " + std::to_string(shape.kv_heads) +
                         " kv_heads evenly");
    SUROGATE_REQUIRE(shape.head_dim > 0 && shape.head_dim % 16 == 0 && shape.head_dim <= 256, op,
                     "head_dim must be a multiple of 16 up to 256, got " + std::to_string(shape.head_dim));
}

// ---------------------------------------------------------------------------------------------------------- documents

// The inputs of a graph that describe documents, in addition to dimensions and strides. Documents of equal lengths need none.
class Documents {
public:
    Documents() = default;
    virtual ~Documents() = default;
    Documents(const Documents&) = delete;
    Documents& operator=(const Documents&) = delete;

    // Adds the lengths of the documents to an attention node.
    virtual void set_lengths(fe::graph::SDPA_attributes&) const {}
    virtual void set_lengths(fe::graph::SDPA_backward_attributes&) const {}

    // Adds the offsets of the documents to a tensor with `elements` elements per token.
    virtual void set_offsets(TensorAttributes&, int64_t /*elements*/) {}

    // Writes lengths and offsets of the documents from token `first` on to the workspace.
    virtual void write(const void* /*cu_seqlens*/, int64_t /*first*/, char* /*workspace*/, cudaStream_t) const {}
    virtual void add_pointers(Pointers&, char* /*workspace*/) const {}
    virtual int64_t workspace_bytes() const { return 0; }
};

// Documents of different lengths: a padding mask, and offsets of each document in each tensor.
//
// Workspace: lengths [documents] int32, offsets [strides, documents + 1] int64.
class RaggedDocuments : public Documents {
public:
    RaggedDocuments(const AttentionShape& shape, fe::graph::Graph& graph) : shape_(shape), graph_(graph) {
        lengths_ = numbers(LENGTHS, "lengths", shape.documents, fe::DataType_t::INT32);
    }

    void set_lengths(fe::graph::SDPA_attributes& node) const override {
        node.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(lengths_);
    }

    void set_lengths(fe::graph::SDPA_backward_attributes& node) const override {
        node.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(lengths_);
        node.set_max_total_seq_len_q(shape_.tokens).set_max_total_seq_len_kv(shape_.tokens);
    }

    void set_offsets(TensorAttributes& tensor, int64_t elements) override {
        for (size_t i = 0; i < elements_.size(); ++i) {
            if (elements_[i] == elements) {
                tensor.set_ragged_offset(offsets_[i]);
                return;
            }
        }
        const int64_t id = FIRST_OFFSETS + static_cast<int64_t>(elements_.size());
        const std::string name = "offsets_" + std::to_string(elements);
        elements_.push_back(elements);
        offsets_.push_back(numbers(id, name.c_str(), shape_.documents + 1, fe::DataType_t::INT64));
        tensor.set_ragged_offset(offsets_.back());
    }

    void write(const void* cu_seqlens, int64_t first, char* workspace, cudaStream_t stream) const override {
        ragged_offsets(cu_seqlens, workspace, workspace + lengths_bytes(), shape_.documents, first, shape_.tokens,
                       elements_.data(), static_cast<int64_t>(elements_.size()), stream);
    }

    void add_pointers(Pointers& pointers, char* workspace) const override {
        pointers[LENGTHS] = workspace;
        for (int64_t i = 0; i < static_cast<int64_t>(elements_.size()); ++i) {
            pointers[FIRST_OFFSETS + i] = workspace + lengths_bytes() + i * offsets_bytes();
        }
    }

    int64_t workspace_bytes() const override {
        return lengths_bytes() + aligned(static_cast<int64_t>(elements_.size()) * offsets_bytes());
    }

private:
    int64_t lengths_bytes() const { return aligned(shape_.documents * static_cast<int64_t>(sizeof(int32_t))); }
    int64_t offsets_bytes() const { return (shape_.documents + 1) * static_cast<int64_t>(sizeof(int64_t)); }

    Tensor numbers(int64_t id, const char* name, int64_t count, fe::DataType_t type) {
        return graph_.tensor(TensorAttributes()
                                 .set_name(name)
                                 .set_uid(id)
                                 .set_dim({count, 1, 1, 1})
                                 .set_stride({1, 1, 1, 1})
                                 .set_data_type(type));
    }

    AttentionShape shape_;
    fe::graph::Graph& graph_;
    Tensor lengths_;
    Numbers elements_;
    std::vector<Tensor> offsets_;
};

// -------------------------------------------------------------------------------------------------------------- graph

// A cuDNN graph over the documents of a micro-batch, with the parts common to forward and backward.
//
// Workspace: that of the documents, `extra` bytes, cuDNN's own.
class AttentionGraph {
public:
    AttentionGraph(const AttentionShape& shape, const char* op) : shape_(shape), op_(op) {
        check_shape(shape, op);
        handle_ = handle_of_device(op);
        graph_.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        documents_ =
            shape.dense() ? std::make_unique<Documents>() : std::make_unique<RaggedDocuments>(shape, graph_);
    }

    fe::graph::Graph& graph() { return graph_; }
    int64_t row() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }

    // Returns the attributes of a causal attention node, with its window: SDPA_attributes or SDPA_backward_attributes.
    template <class Node>
    Node node() const {
        Node node;
        node.set_name(op_)
            .set_attn_scale(static_cast<float>(shape_.scale))
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0);
        if (shape_.window > 0) {
            node.set_diagonal_band_left_bound(to_int(shape_.window, op_, "window"));  // keys j with j + window > i
        }
        documents_->set_lengths(node);
        return node;
    }

    // Returns the attributes of a tensor [tokens, heads, head_dim] with a token stride of `row` elements.
    TensorAttributes attributes(Id id, const char* name, int64_t heads, int64_t row) {
        TensorAttributes result;
        result.set_name(name)
            .set_uid(id)
            .set_dim({shape_.documents, heads, shape_.seq_len, shape_.head_dim})
            .set_stride({shape_.seq_len * row, shape_.head_dim, row, 1});
        documents_->set_offsets(result, row);
        return result;
    }

    Tensor input(Id id, const char* name, int64_t heads, int64_t row) {
        return graph_.tensor(attributes(id, name, heads, row));
    }

    void set_output(const Tensor& tensor, Id id, const char* name, int64_t heads, int64_t row) {
        *tensor = attributes(id, name, heads, row);
        tensor->set_output(true).set_data_type(fe::DataType_t::BFLOAT16);
    }

    // Sets the attributes of lse of `heads` heads, with these strides of documents and heads.
    void set_statistics(TensorAttributes& statistics, int64_t heads, int64_t document_stride, int64_t head_stride) {
        statistics.set_uid(STATS)
            .set_dim({shape_.documents, heads, shape_.seq_len, 1})
            .set_stride({document_stride, head_stride, 1, 1})
            .set_data_type(fe::DataType_t::FLOAT);
        documents_->set_offsets(statistics, 1);
    }

    // Builds the execution plan. `extra` is the number of workspace bytes reserved for the caller.
    void build(int64_t extra) {
        check(graph_.validate(), op_, "validate");
        check(graph_.build_operation_graph(handle_), op_, "build_operation_graph");
        check(graph_.create_execution_plans({fe::HeurMode_t::A}), op_, "create_execution_plans");
        check(graph_.check_support(), op_, "check_support");
        check(graph_.build_plans(), op_, "build_plans");
        check(graph_.get_workspace_size(own_bytes_), op_, "get_workspace_size");
        extra_bytes_ = aligned(extra);
    }

    int64_t workspace_bytes() const { return documents_->workspace_bytes() + extra_bytes_ + aligned(own_bytes_); }
    char* extra(void* workspace) const { return static_cast<char*>(workspace) + documents_->workspace_bytes(); }

    // Writes what the graph reads about documents to the workspace: those of the tokens of its shape, from token `first`
    // of `cu_seqlens` on. Call it before `execute` on these tokens.
    void begin(const void* cu_seqlens, int64_t first, void* workspace, cudaStream_t stream) const {
        check_pointer(workspace, op_, "workspace", workspace_alignment);
        documents_->write(cu_seqlens, first, static_cast<char*>(workspace), stream);
        check(fe::detail::set_stream(handle_, stream), op_, "cudnnSetStream");
    }

    // Enqueues the graph on the stream of `begin`.
    void execute(Pointers pointers, void* workspace) const {
        documents_->add_pointers(pointers, static_cast<char*>(workspace));
        check(graph_.execute(handle_, pointers, extra(workspace) + extra_bytes_), op_, "execute");
    }

private:
    AttentionShape shape_;
    const char* op_;
    cudnnHandle_t handle_ = nullptr;
    fe::graph::Graph graph_;
    std::unique_ptr<Documents> documents_;
    int64_t extra_bytes_ = 0;
    int64_t own_bytes_ = 0;
};

// -------------------------------------------------------------------------------------------------------------- plans

// Serializes the construction of all plans of the process, of both directions and on all devices. Ranks bind their
// kernels in parallel threads, and a backward plan changes an environment variable that the frontend reads while it
// builds a plan (ScoreBytesLimit).
inline std::mutex& plan_mutex() {
    static std::mutex mutex;
    return mutex;
}

// Returns the plan of this thread for a shape on the current device. Calls `make` unless such a plan is in use.
template <class Plan, class Make>
std::shared_ptr<const Plan> shared_plan(const AttentionShape& shape, const Numbers& options, const char* op,
                                        Make make) {
    static std::map<Numbers, std::weak_ptr<const Plan>> plans;  // guarded by plan_mutex
    const auto handle = reinterpret_cast<intptr_t>(handle_of_device(op));
    int64_t scale = 0;
    std::memcpy(&scale, &shape.scale, sizeof(scale));
    Numbers key{handle,      shape.tokens,   shape.documents, shape.seq_len,
                shape.heads, shape.kv_heads, shape.head_dim,  shape.window,
                scale};
    key.insert(key.end(), options.begin(), options.end());
    const std::lock_guard<std::mutex> lock(plan_mutex());
    if (std::shared_ptr<const Plan> plan = plans[key].lock()) {
        return plan;
    }
    std::shared_ptr<const Plan> plan = make();
    plans[key] = plan;
    return plan;
}

}  // namespace surogate
