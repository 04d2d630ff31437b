// Matrix products by cuBLASLt, which is loaded at run time: `surogate_add_kernels(my_package USES cublaslt)`. The module
// then has the Python class `Gemm` too; surogate_core/api/cublaslt.py describes its use.
//
//   D[m,n] = alpha * op(A)[m,k] op(B)[k,n] * scale_a * scale_b (+ bias[n] | + beta * C[m,n])
//
// All matrices are row-major. A is stored as [m,k] with a row stride of `lda` elements, or as [k,m] with trans_a. B is
// stored as [k,n], or as [n,k] with trans_b. C has the dtype and row stride of D and may be D. Sums are fp32 and D is
// rounded once: fp32 operands are multiplied in fp32 (no TF32), and a split-k product with a bf16 D adds its parts in
// fp32. With a bf16 C the product may be rounded to bf16 before C is added: on Hopper cuBLASLt 13.1 does so where C is D
// (the sum is then made by the memory system), and rounds once where C lies elsewhere.
//
// operands (A, B)                D           bias
// bf16, bf16                     bf16, fp32  dtype of D
// fp32, fp32                     fp32        fp32
// e4m3 and e4m3 or e5m2 (FP8)    bf16, fp32  bf16
// e2m1, e2m1 (FP4)               bf16, fp32  bf16
//
// FP8: the scales are fp32 numbers in device memory, read when the product runs (`GemmScaling::Tensor`). Rows of the
// stored A, B and D are multiples of 16 bytes. GPUs of SM89, 90, 120 and 121 multiply only A [m,k] and B [n,k] (no
// trans_a, trans_b); those of SM100 and 103 any layout. `fast` lets Ada and Hopper keep sums in fewer bits than fp32:
// fprop of a block takes 1 to 7 % less time, its relative rms error grows from 1e-4 to 1e-3, and sums of numbers of one
// sign are up to 7 % too small.
//
// Scales of blocks (`GemmScaling::Blocks16` for FP4, `Blocks32` for FP8) multiply 16 or 32 consecutive elements of a row.
// GPUs from SM100 multiply them, only as A [m,k] and B [n,k], with k a multiple of 32. The scales of A (rows m) or B (rows
// n) are ceil(rows / 128) * ceil(C / 4) * 512 bytes, where C = k / block. Scale c of row r is byte
//   (r / 128 * ceil(C / 4) + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4
// and the others are zero. e2m1 is packed: element 2i is in the low half of byte i, and row strides count elements. These
// products compile and have not run on a GPU yet.
//
// With `device_factors`, alpha and beta are read from device memory when the product runs, so a captured graph follows
// factors that earlier kernels write. Otherwise they are arguments of `run`, and constants of a graph.
//
// A `Gemm` is constructed once, when an op is bound, and selects its algorithm then. `run` is asynchronous: it enqueues
// one or two kernels and at most one small memset, and neither allocates nor synchronizes, so it can be captured. Only
// one stream may use the workspace at a time.
//
// A batch is `batch` products of one shape by one kernel. Products that differ only in `batch` and in the strides of a
// batch share one algorithm, which does not split k. So the bits of a result do not depend on the size of the batch.
//
// Reproducibility: an algorithm gives bit-identical results in every run; different algorithms give different results.
// Within a module, products with the same description share one algorithm, separately for timed and untimed ones.
// `exported_choices` and `import_choices` transfer the timed ones to other modules and processes.
//
// Cost: 2mnk FLOPs. On the shapes of a training step, bf16 reaches 65-82 % of the dense peak of an H200 (640-816
// TFLOP/s); a product that adds to fp32 is 0.4-10 % slower; FP8 takes 0.48-0.61 times as long. C costs no pass of its
// own: its transfer overlaps with the arithmetic of other tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace surogate {

// What the elements of A and B are multiplied with: nothing, one fp32 number, a number in ue4m3 for every 16 elements of
// a row, or one in ue8m0 for every 32.
enum class GemmScaling { None, Tensor, Blocks16, Blocks32 };

struct GemmShape {
    int64_t m, n, k;
    bool trans_a, trans_b;
    int64_t lda, ldb, ldd;  // row strides of the stored matrices in elements; 0: contiguous
    int dtype_a, dtype_b, dtype_d;
    bool has_bias;
    int dtype_bias;
    bool accumulate;        // + C
    int64_t batch;          // 0: not a batch
    int64_t stride_a, stride_b, stride_d;  // elements from a matrix of the batch to the next; 0: contiguous
    GemmScaling scaling;    // Tensor or Blocks32 for FP8 operands, Blocks16 for FP4, None for others
    bool fast;              // fast accumulation, for FP8 operands with one scale
    bool device_factors;    // alpha and beta are read from device memory when the product runs
    int64_t library_bytes;  // workspace of cuBLASLt, a multiple of 256
    int64_t alignment_a, alignment_b, alignment_d;  // alignment in bytes of the pointers passed to `run`; powers of
                                                    // two; values above 256 are treated as 256
};

// Buffers and factors of a product. `run` writes to D and the workspace alone.
struct GemmBuffers {
    void* a = nullptr;
    void* b = nullptr;
    void* d = nullptr;
    const void* bias = nullptr;
    void* workspace = nullptr;  // library_bytes, aligned to 256 bytes
    void* c = nullptr;          // null: D
    void* scale_a = nullptr;    // aligned to 16 bytes, as is scale_b
    void* scale_b = nullptr;
    float alpha = 1.0f;
    float beta = 1.0f;          // of C; without accumulate, it is ignored
    float* factors = nullptr;   // with device_factors, {alpha, beta} in device memory instead of the two above, aligned to
                                // 16 bytes; without accumulate, beta must be 0
};

class Gemm {
public:
    // Selects the algorithm: by timing on these buffers (`timing.h`), or, if A, B and D are null, the first one of
    // cuBLASLt's heuristic, which is the same in every run. Timing fills A, B, C, the scales and the factors with numbers
    // and leaves undefined contents in D and the workspace, so construct a Gemm before weights are loaded. bias is not
    // written.
    //
    // Synchronizes the stream, and takes up to 0.8 s if it times the algorithms. Must not be called while the stream is
    // being captured. Throws std::invalid_argument if the shape is not supported, by any GPU or by this one,
    // std::runtime_error if cuBLASLt returns an error or has no algorithm.
    Gemm(const GemmShape& shape, const GemmBuffers& buffers, cudaStream_t stream);
    ~Gemm();
    Gemm(const Gemm&) = delete;
    Gemm& operator=(const Gemm&) = delete;

    // Enqueues the product. Not thread-safe. Without accumulate, c is ignored; without has_bias, bias.
    void run(const GemmBuffers& buffers, cudaStream_t stream);

    // Returns one line: sizes, dtypes, algorithm and, if it was timed, its speed.
    std::string describe() const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// The timed and imported algorithms of this module, as (description, algorithm) strings for a file, and their number. A description contains the
// version of cuBLASLt and the kind of GPU, so an algorithm is never used for another version or GPU. Import before
// constructing a Gemm.
std::vector<std::pair<std::string, std::string>> exported_choices();
size_t count_choices();
void import_choices(const std::vector<std::pair<std::string, std::string>>& choices);

// Fills `out` with normal deviates of mean 0, the same in every call: operands of products that are timed, because their
// bits decide how much power a product takes. The deviation is `random_deviation(dtype)`: 1, for FP8 a seventh of the
// largest number, which is about the ratio of a matrix that was scaled by its largest element, for E2M1 a third, which is
// about that of a block of 16. `size` counts elements; of E2M1 it is even.
void random_normal(void* out, int64_t size, int dtype, cudaStream_t stream);
float random_deviation(int dtype);

}  // namespace surogate
