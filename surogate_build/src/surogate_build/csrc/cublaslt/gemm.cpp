#include "surogate/gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "gemm_choices.h"
#include "gemm_shape.h"
#include "surogate/check.h"
#include "surogate/cublaslt.h"
#include "surogate/dtype.h"
#include "surogate/timing.h"
#include "surogate/workspace.h"

namespace surogate {
namespace {

constexpr const char* op_name = "gemm";
constexpr int requested_choices = 8;
constexpr int blocks_from_sm = 100;
constexpr uintptr_t scale_alignment = 16;  // of scales and factors; cuBLASLt refuses other scales

int64_t products(const GemmShape& s) { return std::max<int64_t>(s.batch, 1); }

double flops(const GemmShape& s) {
    return 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) *
           static_cast<double>(products(s));
}

// Fills `count` stored matrices with random numbers, gaps between them and between their rows included.
void randomize(void* matrix, int64_t rows, int64_t cols, int64_t ld, int64_t count, int64_t stride, int dtype,
               cudaStream_t stream) {
    random_normal(matrix, (count - 1) * stride + (rows - 1) * ld + cols, dtype, stream);
}

// Writes the scale, or the scales of all blocks, with which random numbers of `dtype` have deviation 1.
void set_random_scale(const GemmShape& s, void* scale, int64_t rows, int dtype, cudaStream_t stream) {
    const float value = 1.0f / random_deviation(dtype);
    if (s.scaling == GemmScaling::Tensor) {
        check_cuda(cudaMemcpyAsync(scale, &value, sizeof(value), cudaMemcpyHostToDevice, stream), op_name);
        return;
    }
    const int exponent = std::ilogb(value);  // a power of two: ue4m3 has a bias of 7 and three mantissa bits, ue8m0 of 127
    const int byte = s.scaling == GemmScaling::Blocks16 ? (exponent + 7) << 3 : exponent + 127;
    check_cuda(cudaMemsetAsync(scale, byte, static_cast<size_t>(scale_bytes(s, rows)), stream), op_name);
}

// Writes factors with which D is the product, plus C if it is added.
void set_unit_factors(float* factors, bool accumulate, cudaStream_t stream) {
    const float values[2] = {1.0f, accumulate ? 1.0f : 0.0f};
    check_cuda(cudaMemcpyAsync(factors, values, sizeof(values), cudaMemcpyHostToDevice, stream), op_name);
}

void check_scales(const GemmShape& s, const GemmBuffers& buffers) {
    if (s.scaling != GemmScaling::None) {
        check_pointer(buffers.scale_a, op_name, "scale_a", scale_alignment);
        check_pointer(buffers.scale_b, op_name, "scale_b", scale_alignment);
    }
    if (s.device_factors) {
        check_pointer(buffers.factors, op_name, "factors", scale_alignment);
    }
}

void check_buffers(const GemmShape& s, const GemmBuffers& buffers) {
    check_pointer(buffers.a, op_name, "a", s.alignment_a);
    check_pointer(buffers.b, op_name, "b", s.alignment_b);
    check_pointer(buffers.d, op_name, "d", s.alignment_d);
    if (buffers.c != nullptr) {
        check_pointer(buffers.c, op_name, "c", s.alignment_d);
    }
    if (s.has_bias) {
        check_pointer(buffers.bias, op_name, "bias", bytes_of(s.dtype_bias));
    }
    check_scales(s, buffers);
    if (s.library_bytes > 0) {
        check_pointer(buffers.workspace, op_name, "workspace", workspace_alignment);
    }
}

// Without this, cuBLASLt's heuristic returns CUBLAS_STATUS_INVALID_VALUE, which says nothing of the GPU.
void check_gpu(const GemmShape& s) {
    if (block_of(s) > 0) {
        const int sm = compute_capability();
        SUROGATE_REQUIRE(sm >= blocks_from_sm, op_name,
                         "scales of blocks of " + std::to_string(block_of(s)) +
                             " need a GPU of SM100 (Blackwell) or newer, this is one of SM" + std::to_string(sm));
    }
}

bool is_timed(const GemmBuffers& buffers) { return buffers.a != nullptr; }

}  // namespace

struct Gemm::Impl {
    GemmShape shape;
    cublasLtHandle_t handle;
    Desc desc;
    Layout a, b, d;  // of A, B and D; cuBLASLt computes D^T = B^T A^T in column-major order, so it receives B as its A
    Choice choice;
    std::string description;

    Impl(const GemmShape& s, const GemmBuffers& buffers, cudaStream_t stream)
        : shape(s), handle(library_handle()), desc(make_desc()),
          description(describe_shape(shape) + " | " + describe_platform()) {
        set(desc, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(shape.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(desc, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(shape.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N));
        a = row_major(shape.dtype_a, stored_rows_a(shape), stored_a(shape), shape.lda);
        b = row_major(shape.dtype_b, stored_rows_b(shape), stored_b(shape), shape.ldb);
        d = row_major(shape.dtype_d, shape.m, shape.n, shape.ldd);
        if (shape.batch > 0) {
            set_batches(shape.batch);
        }
        if (shape.has_bias) {
            set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(CUBLASLT_EPILOGUE_BIAS));
            set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(shape.dtype_bias)));
        }
        if (shape.fast) {
            set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(1));
        }
        if (block_of(shape) > 0) {
            const auto mode = static_cast<int32_t>(shape.scaling == GemmScaling::Blocks16
                                                       ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3
                                                       : CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
            set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode);
            set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode);
        }
        if (shape.device_factors) {
            set(desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, static_cast<int32_t>(CUBLASLT_POINTER_MODE_DEVICE));
        }
        set_pointers(buffers);  // the heuristic depends on the alignment of the bias
        choose(buffers, stream);
    }

    void set_batches(int64_t count) const {
        set_batch(a, count, shape.stride_a);
        set_batch(b, count, shape.stride_b);
        set_batch(d, count, shape.stride_d);
    }

    void set_pointers(const GemmBuffers& buffers) const {
        if (shape.has_bias) {
            set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, buffers.bias);
        }
        if (shape.scaling != GemmScaling::None) {
            set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(buffers.scale_b));
            set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(buffers.scale_a));
        }
    }

    // Enqueues the product.
    cublasStatus_t multiply(const cublasLtMatmulAlgo_t& algo, const GemmBuffers& buffers, cudaStream_t stream) const {
        set_pointers(buffers);
        const float host[2] = {buffers.alpha, shape.accumulate ? buffers.beta : 0.0f};
        const float* factors = shape.device_factors ? buffers.factors : host;
        const void* c = shape.accumulate && buffers.c != nullptr ? buffers.c : buffers.d;
        return lt().Matmul(handle, desc.get(), factors, buffers.b, b.get(), buffers.a, a.get(), factors + 1, c, d.get(),
                           buffers.d, d.get(), &algo, buffers.workspace, static_cast<size_t>(shape.library_bytes),
                           stream);
    }

    void choose(const GemmBuffers& buffers, cudaStream_t stream) {
        Choices& all = choices();
        const std::lock_guard<std::mutex> lock(all.mutex);
        const auto known = all.by_description.find(description);
        if (known != all.by_description.end() &&  // a timed choice must not be used for an untimed product
            (known->second.is_imported() || known->second.is_timed()) == is_timed(buffers)) {
            choice = known->second;
            check_known(buffers, stream);
            return;
        }
        choice = best_of(candidates(is_timed(buffers)), buffers, stream);
        all.by_description[description] = choice;
    }

    // Checks an algorithm that may come from a file of another machine: an unsuitable one must neither be run unchecked
    // nor be replaced silently. With buffers it runs once, so that its kernel is loaded before a graph is captured.
    void check_known(const GemmBuffers& buffers, cudaStream_t stream) {
        cublasLtMatmulHeuristicResult_t result{};
        const cublasStatus_t status = lt().MatmulAlgoCheck(handle, desc.get(), b.get(), a.get(), d.get(), d.get(),
                                                           &choice.algo, &result);
        check_status(status, "the cached algorithm for " + description + " is not supported. To select a new one, delete "
                             "surogate/autotune in $XDG_CACHE_HOME or ~/.cache");
        if (static_cast<int64_t>(result.workspaceSize) > shape.library_bytes) {
            throw std::runtime_error("gemm: the cached algorithm for " + description + " needs " +
                                     std::to_string(result.workspaceSize) + " bytes of workspace, available are " +
                                     std::to_string(shape.library_bytes) + ". To select a new one, delete "
                                     "surogate/autotune in $XDG_CACHE_HOME or ~/.cache");
        }
        if (is_timed(buffers)) {
            check_status(multiply(choice.algo, buffers, stream),
                         "cublasLtMatmul with the cached algorithm for " + description);
            check_cuda(cudaStreamSynchronize(stream), op_name);
        }
    }

    std::vector<cublasLtMatmulAlgo_t> candidates(bool timed) const {
        // Batches of all sizes share the algorithm. With a count of 2 or more, the heuristic returns only algorithms that
        // support batches. Without timing its first one is used, so that count must not depend on the batch.
        if (shape.batch > 0) {
            set_batches(timed ? std::max<int64_t>(shape.batch, 2) : 2);
        }
        const Preference preference = make_preference();
        set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(shape.library_bytes));
        // Split-k with bf16 parts would round each part before the sum. With a bias or C, even the sum of fp32 parts is
        // rounded to D before that is added, so split-k is disabled.
        uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
        if (shape.dtype_d == BF16) {
            schemes = shape.has_bias || shape.accumulate ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        }
        if (shape.batch > 0) {
            schemes = CUBLASLT_REDUCTION_SCHEME_NONE;
        }
        set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(shape.alignment_b));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(shape.alignment_a));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(shape.alignment_d));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(shape.alignment_d));
        cublasLtMatmulHeuristicResult_t results[requested_choices] = {};
        int found = 0;
        check_status(lt().MatmulAlgoGetHeuristic(handle, desc.get(), b.get(), a.get(), d.get(), d.get(),
                                                 preference.get(), requested_choices, results, &found),
                     "no algorithm for " + description);
        if (shape.batch > 0) {
            set_batches(shape.batch);
        }
        std::vector<cublasLtMatmulAlgo_t> algos;
        for (int i = 0; i < found; ++i) {
            if (results[i].state == CUBLAS_STATUS_SUCCESS) {
                algos.push_back(results[i].algo);
            }
        }
        if (algos.empty()) {
            throw std::runtime_error("gemm: no algorithm for " + description);
        }
        return algos;
    }

    // Planned buffers are zero when ops are bound. Products of zeros take less power, and algorithms rank differently.
    void randomize_operands(const GemmBuffers& buffers, cudaStream_t stream) const {
        const int64_t count = products(shape);
        randomize(buffers.a, stored_rows_a(shape), stored_a(shape), shape.lda, count, shape.stride_a, shape.dtype_a,
                  stream);
        randomize(buffers.b, stored_rows_b(shape), stored_b(shape), shape.ldb, count, shape.stride_b, shape.dtype_b,
                  stream);
        if (shape.accumulate) {  // D grows by one product a launch, which stays far from the largest bf16
            void* c = buffers.c != nullptr ? buffers.c : buffers.d;
            randomize(c, shape.m, shape.n, shape.ldd, count, shape.stride_d, shape.dtype_d, stream);
        }
        if (shape.scaling != GemmScaling::None) {
            set_random_scale(shape, buffers.scale_a, shape.m, shape.dtype_a, stream);
            set_random_scale(shape, buffers.scale_b, shape.n, shape.dtype_b, stream);
        }
        if (shape.device_factors) {
            set_unit_factors(buffers.factors, shape.accumulate, stream);
        }
    }

    Choice best_of(const std::vector<cublasLtMatmulAlgo_t>& algos, const GemmBuffers& buffers, cudaStream_t stream) {
        const int count = static_cast<int>(algos.size());
        if (!is_timed(buffers)) {
            return {algos[0], 0, count, 0};
        }
        randomize_operands(buffers, stream);
        const auto launch = [&](size_t i) { return multiply(algos[i], buffers, stream) == CUBLAS_STATUS_SUCCESS; };
        const Timed timed = fastest(algos.size(), launch, stream);
        if (timed.ms == std::numeric_limits<float>::infinity()) {
            throw std::runtime_error("gemm: every algorithm failed for " + description);
        }
        return {algos[timed.index], timed.ms, count, timed.slowest_ms};
    }
};

Gemm::Gemm(const GemmShape& shape, const GemmBuffers& buffers, cudaStream_t stream) {
    const GemmShape s = checked(shape);
    if (buffers.a != nullptr || buffers.b != nullptr || buffers.d != nullptr) {
        check_buffers(s, buffers);
    }
    check_scales(s, buffers);
    check_gpu(s);
    impl_ = std::make_unique<Impl>(s, buffers, stream);
}

Gemm::~Gemm() = default;

void Gemm::run(const GemmBuffers& buffers, cudaStream_t stream) {
    check_buffers(impl_->shape, buffers);
    check_status(impl_->multiply(impl_->choice.algo, buffers, stream), impl_->description);
}

std::string Gemm::describe() const {
    const auto attribute = [&](cublasLtMatmulAlgoConfigAttributes_t which, auto value) {
        size_t written = 0;
        const cublasStatus_t status =
            lt().MatmulAlgoConfigGetAttribute(&impl_->choice.algo, which, &value, sizeof(value), &written);
        return status == CUBLAS_STATUS_SUCCESS ? std::to_string(value) : std::string("-");
    };
    std::string text = impl_->description + " | algorithm " + attribute(CUBLASLT_ALGO_CONFIG_ID, int32_t{0}) +
                       ", tile " + attribute(CUBLASLT_ALGO_CONFIG_TILE_ID, uint32_t{0}) +
                       ", stages " + attribute(CUBLASLT_ALGO_CONFIG_STAGES_ID, uint32_t{0}) +
                       ", cluster " + attribute(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, uint16_t{0}) +
                       ", split-k " + attribute(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, int32_t{0}) +
                       ", reduction " + attribute(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, uint32_t{0});
    const Choice& choice = impl_->choice;
    if (choice.is_imported()) {
        return text + " | imported";
    }
    text += " | of " + std::to_string(choice.candidates);
    if (choice.is_timed()) {
        char speed[64];
        std::snprintf(speed, sizeof(speed), ", %.1f to %.1f us, %.0f TFLOP/s", 1e3 * choice.ms,
                      1e3 * choice.slowest_ms, flops(impl_->shape) / choice.ms * 1e-9);
        text += speed;
    }
    return text;
}

}  // namespace surogate
