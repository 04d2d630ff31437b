#include "gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <mutex>

#include "elementwise.h"
#include "library.h"
#include "surogate/check.h"
#include "surogate/dtype.h"
#include "workspace.h"

namespace surogate {
namespace {

constexpr const char* op_name = "gemm";
constexpr int requested_choices = 8;
constexpr int timed_rounds = 5;
constexpr float sample_ms = 0.5f;    // a sample repeats the product for about this time, at most 20 times
constexpr float margin = 0.98f;      // the heuristic's first algorithm is replaced only by one that takes less than
                                     // this fraction of its time, so that noise does not decide

// ---------------------------------------------------------------------------------------------------- the library

struct CublasLt {
#define SUROGATE_LT(name) decltype(&cublasLt##name) name = symbol<decltype(&cublasLt##name)>(cublaslt(), "cublasLt" #name)
    SUROGATE_LT(Create);
    SUROGATE_LT(GetVersion);
    SUROGATE_LT(GetStatusName);
    SUROGATE_LT(Matmul);
    SUROGATE_LT(MatmulDescCreate);
    SUROGATE_LT(MatmulDescDestroy);
    SUROGATE_LT(MatmulDescSetAttribute);
    SUROGATE_LT(MatrixLayoutCreate);
    SUROGATE_LT(MatrixLayoutDestroy);
    SUROGATE_LT(MatmulPreferenceCreate);
    SUROGATE_LT(MatmulPreferenceDestroy);
    SUROGATE_LT(MatmulPreferenceSetAttribute);
    SUROGATE_LT(MatmulAlgoGetHeuristic);
    SUROGATE_LT(MatmulAlgoCheck);
    SUROGATE_LT(MatmulAlgoConfigGetAttribute);
#undef SUROGATE_LT
};

const CublasLt& lt() {
    static const CublasLt functions;
    return functions;
}

void check_status(cublasStatus_t status, const std::string& what) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        throw std::runtime_error(std::string(op_name) + ": " + what + ": " + lt().GetStatusName(status));
    }
}

// One handle per thread and device. Handles live until the process ends, because products keep them.
cublasLtHandle_t library_handle() {
    static thread_local std::map<int, cublasLtHandle_t> handles;
    int device = 0;
    check_cuda(cudaGetDevice(&device), op_name);
    cublasLtHandle_t& handle = handles[device];
    if (handle == nullptr) {
        check_status(lt().Create(&handle), "cublasLtCreate");
    }
    return handle;
}

struct DestroyDesc {
    void operator()(cublasLtMatmulDesc_t desc) const { lt().MatmulDescDestroy(desc); }
};
struct DestroyLayout {
    void operator()(cublasLtMatrixLayout_t layout) const { lt().MatrixLayoutDestroy(layout); }
};
struct DestroyPreference {
    void operator()(cublasLtMatmulPreference_t preference) const { lt().MatmulPreferenceDestroy(preference); }
};
using Desc = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulDesc_t>, DestroyDesc>;
using Layout = std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>, DestroyLayout>;
using Preference = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>, DestroyPreference>;

cudaDataType_t data_type(int dtype) { return dtype == BF16 ? CUDA_R_16BF : CUDA_R_32F; }

template <class T>
void set(const Desc& desc, cublasLtMatmulDescAttributes_t attribute, T value) {
    check_status(lt().MatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)),
                 "cublasLtMatmulDescSetAttribute");
}

template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    check_status(lt().MatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
                 "cublasLtMatmulPreferenceSetAttribute");
}

// cuBLASLt's default layout is column-major: a row-major [rows, cols] matrix is a column-major [cols, rows] one.
Layout row_major(int dtype, int64_t rows, int64_t cols, int64_t ld) {
    cublasLtMatrixLayout_t layout = nullptr;
    check_status(lt().MatrixLayoutCreate(&layout, data_type(dtype), static_cast<uint64_t>(cols),
                                         static_cast<uint64_t>(rows), ld),
                 "cublasLtMatrixLayoutCreate");
    return Layout(layout);
}

// ---------------------------------------------------------------------------------------------------- the choices

struct Choice {
    cublasLtMatmulAlgo_t algo{};
    float ms = 0;        // measured time; 0: not timed
    int candidates = 0;  // number of algorithms compared; 0: imported

    bool is_timed() const { return ms > 0; }
    bool is_imported() const { return candidates == 0; }
};

// The mutex is held while a product is timed. If two threads need the same product, the second one reuses the algorithm
// of the first, and their measurements do not disturb each other.
struct Choices {
    std::mutex mutex;
    std::map<std::string, Choice> by_description;
};

Choices& choices() {
    static Choices all;
    return all;
}

std::string to_hex(const cublasLtMatmulAlgo_t& algo) {
    std::string hex;
    for (const uint64_t word : algo.data) {
        char digits[17];
        std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(word));
        hex += digits;
    }
    return hex;
}

cublasLtMatmulAlgo_t from_hex(const std::string& hex) {
    cublasLtMatmulAlgo_t algo{};
    constexpr size_t words = sizeof(algo.data) / sizeof(algo.data[0]);
    const bool digits = hex.find_first_not_of("0123456789abcdef") == std::string::npos;
    SUROGATE_REQUIRE(digits && hex.size() == 16 * words, "gemm_import", "not an algorithm: '" + hex + "'");
    for (size_t i = 0; i < words; ++i) {
        algo.data[i] = std::stoull(hex.substr(16 * i, 16), nullptr, 16);
    }
    return algo;
}

// ----------------------------------------------------------------------------------------------------- the shapes

int64_t stored_a(const GemmShape& s) { return s.trans_a ? s.m : s.k; }  // elements per stored row
int64_t stored_b(const GemmShape& s) { return s.trans_b ? s.k : s.n; }

GemmShape checked(GemmShape s) {
    check_positive(s.m, op_name, "m");
    check_positive(s.n, op_name, "n");
    check_positive(s.k, op_name, "k");
    s.lda = s.lda == 0 ? stored_a(s) : s.lda;
    s.ldb = s.ldb == 0 ? stored_b(s) : s.ldb;
    s.ldd = s.ldd == 0 ? s.n : s.ldd;
    SUROGATE_REQUIRE(s.lda >= stored_a(s), op_name,
                     "lda must be at least " + std::to_string(stored_a(s)) + ", got " + std::to_string(s.lda));
    SUROGATE_REQUIRE(s.ldb >= stored_b(s), op_name,
                     "ldb must be at least " + std::to_string(stored_b(s)) + ", got " + std::to_string(s.ldb));
    SUROGATE_REQUIRE(s.ldd >= s.n, op_name,
                     "ldd must be at least " + std::to_string(s.n) + ", got " + std::to_string(s.ldd));
    const auto supported = [](int dtype) { return dtype == BF16 || dtype == FP32; };
    SUROGATE_REQUIRE(supported(s.dtype_ab), op_name,
                     std::string("dtype_ab must be fp32 or bf16, got ") + name_of(s.dtype_ab));
    SUROGATE_REQUIRE(supported(s.dtype_d), op_name,
                     std::string("dtype_d must be fp32 or bf16, got ") + name_of(s.dtype_d));
    SUROGATE_REQUIRE(!s.accumulate || s.dtype_ab == s.dtype_d || s.dtype_d == FP32, op_name,
                     "fp32 operands with a bf16 D cannot accumulate");
    SUROGATE_REQUIRE(!s.accumulate || !s.has_bias, op_name, "a product with a bias cannot accumulate");
    if (s.has_bias) {
        const int product = s.dtype_ab == FP32 ? FP32 : s.dtype_d;
        SUROGATE_REQUIRE(s.dtype_bias == product || (s.dtype_bias == BF16 && product == FP32), op_name,
                         std::string("dtype_bias cannot be ") + name_of(s.dtype_bias) + " with a product in " +
                             name_of(product));
    }
    SUROGATE_REQUIRE(s.library_bytes >= 0 && s.library_bytes % workspace_alignment == 0, op_name,
                     "library_bytes must be a multiple of 256");
    for (int64_t* alignment : {&s.alignment_a, &s.alignment_b, &s.alignment_d}) {
        SUROGATE_REQUIRE(*alignment > 0 && (*alignment & (*alignment - 1)) == 0, op_name,
                         "alignments must be powers of two");
        *alignment = std::min(*alignment, workspace_alignment);
    }
    return s;
}

// cuBLASLt cannot write bf16 for fp32 operands, so such a product is computed in fp32 in the workspace and then cast.
bool is_staged(const GemmShape& s) { return s.dtype_ab == FP32 && s.dtype_d == BF16; }
int product_dtype(const GemmShape& s) { return is_staged(s) ? FP32 : s.dtype_d; }
bool is_bias_widened(const GemmShape& s) { return s.has_bias && s.dtype_bias != product_dtype(s); }
int64_t staged_bytes(const GemmShape& s) { return is_staged(s) ? aligned(s.m * s.n * 4) : 0; }
int64_t bias_bytes(const GemmShape& s) { return is_bias_widened(s) ? aligned(s.n * 4) : 0; }

void* offset(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

std::string describe_shape(const GemmShape& s) {
    const auto n = [](int64_t value) { return std::to_string(value); };
    std::string text = n(s.m) + "x" + n(s.n) + "x" + n(s.k) + (s.trans_a ? " t" : " n") + (s.trans_b ? "t " : "n ");
    text += std::string(name_of(s.dtype_ab)) + "->" + name_of(product_dtype(s));
    text += (s.has_bias ? " bias" : "") + std::string(s.accumulate ? " accumulate" : "");
    if (s.lda != stored_a(s) || s.ldb != stored_b(s) || s.ldd != s.n) {
        text += " ld " + n(s.lda) + "," + n(s.ldb) + "," + n(s.ldd);
    }
    if (std::min({s.alignment_a, s.alignment_b, s.alignment_d}) < 256) {
        text += " aligned " + n(s.alignment_a) + "," + n(s.alignment_b) + "," + n(s.alignment_d);
    }
    return text + " workspace " + n(s.library_bytes);
}

// Describes what the choice of an algorithm depends on besides the product: the version of cuBLASLt and the kind of
// GPU.
std::string describe_platform() {
    int device = 0, major = 0, minor = 0, processors = 0;
    check_cuda(cudaGetDevice(&device), op_name);
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op_name);
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), op_name);
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), op_name);
    return " | cublasLt " + std::to_string(lt().GetVersion()) + ", sm" + std::to_string(10 * major + minor) + " x " +
           std::to_string(processors);
}

// ----------------------------------------------------------------------------------------------------- the timing

class Event {
public:
    Event() { check_cuda(cudaEventCreate(&event_), op_name); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t get() const { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

// Returns the mean time of `repeats` launches in milliseconds, or infinity if a launch fails.
template <class Launch>
float measure(const Launch& launch, int repeats, const Event& start, const Event& end, cudaStream_t stream) {
    check_cuda(cudaEventRecord(start.get(), stream), op_name);
    for (int i = 0; i < repeats; ++i) {
        if (launch() != CUBLAS_STATUS_SUCCESS) {
            check_cuda(cudaStreamSynchronize(stream), op_name);
            return std::numeric_limits<float>::infinity();
        }
    }
    check_cuda(cudaEventRecord(end.get(), stream), op_name);
    check_cuda(cudaEventSynchronize(end.get()), op_name);
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, start.get(), end.get()), op_name);
    return ms / static_cast<float>(repeats);
}

float median(std::vector<float> samples) {
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
}

// Returns the median time of each candidate. Every round measures all candidates, so that a drift of the GPU clock
// affects all of them equally.
template <class Launch>
std::vector<float> measure_all(size_t candidates, const Launch& launch, cudaStream_t stream) {
    const Event start, end;
    std::vector<int> repeats(candidates);
    for (size_t i = 0; i < candidates; ++i) {
        const auto run = [&] { return launch(i); };
        measure(run, 2, start, end, stream);  // loads the kernel
        const float ms = measure(run, 1, start, end, stream);
        repeats[i] = std::clamp(static_cast<int>(sample_ms / std::max(ms, 0.001f)), 1, 20);
    }
    std::vector<std::vector<float>> samples(candidates);
    for (int round = 0; round < timed_rounds; ++round) {
        for (size_t i = 0; i < candidates; ++i) {
            samples[i].push_back(measure([&] { return launch(i); }, repeats[i], start, end, stream));
        }
    }
    std::vector<float> ms;
    for (const std::vector<float>& of_one : samples) {
        ms.push_back(median(of_one));
    }
    return ms;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- the product

struct Gemm::Impl {
    GemmShape shape;
    cublasLtHandle_t handle;
    Desc desc;
    Layout a, b, d;  // of A, B and D; cuBLASLt computes D^T = B^T A^T in column-major order, so it receives B as its A
    Choice choice;
    std::string description;

    Impl(const GemmShape& s, const GemmBuffers& buffers, cudaStream_t stream)
        : shape(checked(s)), handle(library_handle()), description(describe_shape(shape) + describe_platform()) {
        cublasLtMatmulDesc_t made = nullptr;
        check_status(lt().MatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
        desc.reset(made);
        set(desc, CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(shape.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(desc, CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(shape.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N));
        a = row_major(shape.dtype_ab, shape.trans_a ? shape.k : shape.m, stored_a(shape), shape.lda);
        b = row_major(shape.dtype_ab, shape.trans_b ? shape.n : shape.k, stored_b(shape), shape.ldb);
        d = row_major(product_dtype(shape), shape.m, shape.n, is_staged(shape) ? shape.n : shape.ldd);
        SUROGATE_REQUIRE(!is_staged(shape) || shape.ldd == shape.n, op_name, "fp32 operands with a bf16 D need ldd = n");
        if (shape.has_bias) {
            set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(CUBLASLT_EPILOGUE_BIAS));
            set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(product_dtype(shape))));
            set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, buffers.bias);  // the heuristic depends on its alignment
        }
        choose(buffers, stream);
    }

    // Enqueues the product. Writes to the workspace if the product is staged, otherwise to pd. Without pc, C is D.
    cublasStatus_t multiply(const cublasLtMatmulAlgo_t& algo, const void* pa, const void* pb, const void* pc, void* pd,
                            const void* bias, void* workspace, cudaStream_t stream) const {
        if (shape.has_bias) {
            const void* wide = is_bias_widened(shape) ? offset(workspace, shape.library_bytes + staged_bytes(shape)) : bias;
            set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, wide);
        }
        void* product = is_staged(shape) ? offset(workspace, shape.library_bytes) : pd;
        const float alpha = 1.0f, beta = shape.accumulate ? 1.0f : 0.0f;
        const void* c = shape.accumulate && pc != nullptr ? pc : product;
        return lt().Matmul(handle, desc.get(), &alpha, pb, b.get(), pa, a.get(), &beta, c, d.get(), product, d.get(),
                           &algo, workspace, static_cast<size_t>(shape.library_bytes), stream);
    }

    void choose(const GemmBuffers& buffers, cudaStream_t stream) {
        Choices& all = choices();
        const std::lock_guard<std::mutex> lock(all.mutex);
        const auto known = all.by_description.find(description);
        const bool timed = buffers.a != nullptr;  // a timed choice must not be used for an untimed product
        if (known != all.by_description.end() &&
            (known->second.is_imported() || known->second.is_timed()) == timed) {
            choice = known->second;
            check_known(buffers, stream);
            return;
        }
        choice = best_of(candidates(), buffers, stream);
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
        if (buffers.a != nullptr) {
            check_status(multiply(choice.algo, buffers.a, buffers.b, buffers.c, buffers.d, buffers.bias,
                                  buffers.workspace, stream),
                         "cublasLtMatmul with the cached algorithm for " + description);
            check_cuda(cudaStreamSynchronize(stream), op_name);
        }
    }

    std::vector<cublasLtMatmulAlgo_t> candidates() const {
        cublasLtMatmulPreference_t made = nullptr;
        check_status(lt().MatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
        const Preference preference(made);
        set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(shape.library_bytes));
        // Split-k with bf16 parts would round each part before the sum. With a bias or C, even the sum of fp32 parts is
        // rounded to D before that is added, so split-k is disabled.
        uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
        if (product_dtype(shape) == BF16) {
            schemes = shape.has_bias || shape.accumulate ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        }
        set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
        const int64_t alignment_d = is_staged(shape) ? workspace_alignment : shape.alignment_d;
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(shape.alignment_b));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(shape.alignment_a));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(alignment_d));
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(alignment_d));
        cublasLtMatmulHeuristicResult_t results[requested_choices] = {};
        int found = 0;
        check_status(lt().MatmulAlgoGetHeuristic(handle, desc.get(), b.get(), a.get(), d.get(), d.get(),
                                                 preference.get(), requested_choices, results, &found),
                     "no algorithm for " + description);
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

    Choice best_of(const std::vector<cublasLtMatmulAlgo_t>& algos, const GemmBuffers& buffers, cudaStream_t stream) {
        const int count = static_cast<int>(algos.size());
        if (buffers.a == nullptr) {
            return {algos[0], 0, count};
        }
        const auto launch = [&](size_t i) {
            return multiply(algos[i], buffers.a, buffers.b, buffers.c, buffers.d, buffers.bias, buffers.workspace,
                            stream);
        };
        const std::vector<float> ms = measure_all(algos.size(), launch, stream);
        const size_t fastest = static_cast<size_t>(std::min_element(ms.begin(), ms.end()) - ms.begin());
        if (ms[fastest] == std::numeric_limits<float>::infinity()) {
            throw std::runtime_error("gemm: every algorithm failed for " + description);
        }
        const size_t taken = ms[fastest] < margin * ms[0] ? fastest : 0;
        return {algos[taken], ms[taken], count};
    }
};

Gemm::Gemm(const GemmShape& shape, const GemmBuffers& buffers, cudaStream_t stream) {
    const GemmShape s = checked(shape);
    if (buffers.a != nullptr || buffers.b != nullptr || buffers.d != nullptr) {
        check_pointer(buffers.a, op_name, "a", s.alignment_a);
        check_pointer(buffers.b, op_name, "b", s.alignment_b);
        check_pointer(buffers.d, op_name, "d", s.alignment_d);
        if (buffers.c != nullptr) {
            check_pointer(buffers.c, op_name, "c", s.alignment_d);
        }
        if (s.has_bias) {
            check_pointer(buffers.bias, op_name, "bias", bytes_of(s.dtype_bias));
        }
        if (workspace_bytes(s) > 0) {
            check_pointer(buffers.workspace, op_name, "workspace", workspace_alignment);
        }
    }
    impl_ = std::make_unique<Impl>(s, buffers, stream);
}

Gemm::~Gemm() = default;

void Gemm::run(const void* a, const void* b, void* d, const void* bias, void* workspace, cudaStream_t stream,
               const void* c) {
    const GemmShape& s = impl_->shape;
    check_pointer(a, op_name, "a", s.alignment_a);
    check_pointer(b, op_name, "b", s.alignment_b);
    check_pointer(d, op_name, "d", s.alignment_d);
    if (c != nullptr) {
        check_pointer(c, op_name, "c", s.alignment_d);
    }
    if (workspace_bytes(s) > 0) {
        check_pointer(workspace, op_name, "workspace", workspace_alignment);
    }
    if (s.has_bias) {
        check_pointer(bias, op_name, "bias", bytes_of(s.dtype_bias));
    }
    if (is_bias_widened(s)) {
        cast(bias, offset(workspace, s.library_bytes + staged_bytes(s)), s.n, false, BF16, FP32, stream);
    }
    check_status(impl_->multiply(impl_->choice.algo, a, b, c, d, bias, workspace, stream), impl_->description);
    if (is_staged(s)) {
        cast(offset(workspace, s.library_bytes), d, s.m * s.n, false, FP32, BF16, stream);
    }
}

int64_t Gemm::workspace_bytes(const GemmShape& shape) {
    const GemmShape s = checked(shape);
    return s.library_bytes + staged_bytes(s) + bias_bytes(s);
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
        const GemmShape& s = impl_->shape;
        const double flops = 2.0 * static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
        char speed[64];
        std::snprintf(speed, sizeof(speed), ", %.1f us, %.0f TFLOP/s", 1e3 * choice.ms, flops / choice.ms * 1e-9);
        text += speed;
    }
    return text;
}

std::vector<std::pair<std::string, std::string>> exported_choices() {
    Choices& all = choices();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::vector<std::pair<std::string, std::string>> list;
    for (const auto& [description, choice] : all.by_description) {
        if (choice.is_timed() || choice.is_imported()) {
            list.emplace_back(description, to_hex(choice.algo));
        }
    }
    return list;
}

void import_choices(const std::vector<std::pair<std::string, std::string>>& list) {
    Choices& all = choices();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& [description, algorithm] : list) {
        all.by_description[description] = {from_hex(algorithm), 0, 0};
    }
}

int64_t alignment_of(uintptr_t address) {
    const uintptr_t lowest_bit = address & (~address + 1);
    return lowest_bit == 0 || lowest_bit > 256 ? 256 : static_cast<int64_t>(lowest_bit);
}

}  // namespace surogate
