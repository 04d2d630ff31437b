// Matrix products by cuBLASLt, which is loaded at run time (`library.h`).
//
//   D[m,n] = op(A)[m,k] op(B)[k,n] (+ bias[n] | + C[m,n])
//
// All matrices are row-major. A is stored as [m,k] with a row stride of `lda` elements, or as [k,m] with trans_a. B is
// stored as [k,n], or as [n,k] with trans_b. C has the dtype and row stride of D and may be D. Sums are fp32 and D is
// rounded once: fp32 operands are multiplied in fp32 (no TF32), and a split-k product with a bf16 D adds its parts in
// fp32. With a bf16 C the product may be rounded to bf16 before C is added: on Hopper cuBLASLt 13.1 does so where C is D
// (the sum is then made by the memory system), and rounds once where C lies elsewhere.
//
// operands (A, B)  D     bias
// bf16             bf16  bf16
// bf16             fp32  fp32, or bf16, which is first converted to fp32 in the workspace
// fp32             fp32  fp32
// fp32             bf16  fp32; the product is computed in fp32 in the workspace and then rounded; no C
//
// A `Gemm` is constructed once, when an op is bound, and selects its algorithm then. `run` is asynchronous: it enqueues
// 1 or 2 kernels and at most one small memset, and neither allocates nor synchronizes, so it can be captured. Only one
// stream may use the workspace at a time.
//
// Reproducibility: an algorithm gives bit-identical results in every run; different algorithms give different results.
// Within a process, products with the same description share one algorithm, separately for timed and untimed ones.
// `exported_choices` and `import_choices` transfer the timed ones to other processes.
//
// Cost: 2mnk FLOPs. On the shapes of a training step, bf16 reaches 65-82 % of the dense peak of an H200 (640-816
// TFLOP/s); a product that adds to fp32 is 0.4-10 % slower. C costs no pass of its own: its transfer overlaps with the
// arithmetic of other tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace surogate {

struct GemmShape {
    int64_t m, n, k;
    bool trans_a, trans_b;
    int64_t lda, ldb, ldd;          // row strides of the stored matrices in elements; 0: contiguous
    int dtype_ab, dtype_d;          // BF16 or FP32
    bool has_bias;
    int dtype_bias;
    bool accumulate;                // + C
    int64_t library_bytes;          // workspace of cuBLASLt, a multiple of 256
    int64_t alignment_a, alignment_b, alignment_d;  // alignment in bytes of the pointers passed to `run`; powers of
                                                    // two; values above 256 are treated as 256
};

// Buffers for timing the algorithms (`timing.h`). If A, B and D are null, nothing is timed and the first algorithm of
// cuBLASLt's heuristic is used, which is the same in every run.
// Timing fills A, B and C with random numbers and leaves undefined contents in D and the workspace. So construct a Gemm
// before weights are loaded.
struct GemmBuffers {
    void* a = nullptr;
    void* b = nullptr;
    void* d = nullptr;
    const void* bias = nullptr;
    void* workspace = nullptr;
    void* c = nullptr;  // null: D
};

class Gemm {
public:
    // Synchronizes the stream, and takes up to 0.8 s if it times the algorithms. Must not be called while the stream is
    // being captured. Throws std::invalid_argument if the shape is not supported, std::runtime_error if cuBLASLt returns
    // an error.
    Gemm(const GemmShape& shape, const GemmBuffers& buffers, cudaStream_t stream);
    ~Gemm();
    Gemm(const Gemm&) = delete;
    Gemm& operator=(const Gemm&) = delete;

    // Enqueues the product. Not thread-safe. `c` is null where C is D, and ignored without accumulate; `bias` is ignored
    // without has_bias. The workspace has `workspace_bytes(shape)` bytes, aligned to 256 bytes.
    void run(const void* a, const void* b, void* d, const void* bias, void* workspace, cudaStream_t stream,
             const void* c = nullptr);

    // Returns one line: sizes, dtypes, algorithm and, if it was timed, its speed.
    std::string describe() const;

    // Returns library_bytes plus the space for an fp32 product or bias that is converted in the workspace.
    static int64_t workspace_bytes(const GemmShape& shape);

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// The algorithms selected in this process, as (description, algorithm) strings for a file. A description contains the
// version of cuBLASLt and the kind of GPU, so an algorithm is never used for another version or GPU. Import before
// constructing a Gemm.
std::vector<std::pair<std::string, std::string>> exported_choices();
void import_choices(const std::vector<std::pair<std::string, std::string>>& choices);

// Returns the largest power of two up to 256 that divides `address`.
int64_t alignment_of(uintptr_t address);

}  // namespace surogate
