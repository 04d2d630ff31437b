// Matrix products by cuBLASLt, which is found at run time (`library.h`).
//
//   D[m,n] = op(A)[m,k] op(B)[k,n] (+ bias[n]) (+ D)
//
// All row-major. op(A) is A stored [m,k] with rows of `lda` elements, or, with trans_a, A stored [k,m] and read
// transposed; the same for B ([k,n], or [n,k] with trans_b). Sums are fp32 and D is rounded once: fp32 operands are
// multiplied in fp32 (no TF32), and a product split along k into a bf16 D adds its parts in fp32.
//
// operands (A, B)  D     bias
// bf16             bf16  bf16
// bf16             fp32  fp32, or bf16, which is widened in the workspace first
// fp32             fp32  fp32
// fp32             bf16  fp32; the product is made in fp32 in the workspace, then rounded; no accumulation
//
// A `Gemm` is made once, when an op is bound, and knows its algorithm; `run` only enqueues: 1 or 2 kernels and at most
// one small memset, no allocation, no synchronisation, capturable. The workspace belongs to one stream at a time.
//
// Reproducible: an algorithm gives the same bits in every run, another algorithm gives others. Products of one
// description share one algorithm within a process, the timed and the untimed ones each; `exported_choices` and
// `import_choices` carry the timed ones to another.
//
// Cost: 2mnk FLOP; bf16 reaches 65-82 % of the dense peak of an H200 on the shapes of a training step (640-816
// TFLOP/s), an accumulating product 0.4-10 % less.
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
    int64_t lda, ldb, ldd;          // elements from row to row as stored; 0: no gap
    int dtype_ab, dtype_d;          // BF16 or FP32
    bool has_bias;
    int dtype_bias;
    bool accumulate;                // D +=
    int64_t library_bytes;          // scratch that cuBLASLt may use, a multiple of 256
    int64_t alignment_a, alignment_b, alignment_d;  // powers of two that every later pointer is a multiple of; at most
                                                    // 256 counts
};

// Where to time the algorithms. Without A, B and D (null) the library's own first choice is taken, which is the same in
// every run.
// A and B are only read; D and the workspace are overwritten with rubbish, D also when the product accumulates: so
// plan before the first step, while no gradient is in memory. What the buffers hold does not matter.
struct GemmBuffers {
    const void* a = nullptr;
    const void* b = nullptr;
    void* d = nullptr;
    const void* bias = nullptr;
    void* workspace = nullptr;
};

class Gemm {
public:
    // Synchronises the stream and may take milliseconds. Throws std::invalid_argument for a shape that is not served,
    // std::runtime_error when the library refuses. Not while the stream is being captured.
    Gemm(const GemmShape& shape, const GemmBuffers& buffers, cudaStream_t stream);
    ~Gemm();
    Gemm(const Gemm&) = delete;
    Gemm& operator=(const Gemm&) = delete;

    // For one thread at a time. `bias` is ignored without has_bias. The workspace has `workspace_bytes(shape)`,
    // aligned to 256 bytes.
    void run(const void* a, const void* b, void* d, const void* bias, void* workspace, cudaStream_t stream);

    // One line: sizes, dtypes, algorithm and, where it was timed, its speed.
    std::string describe() const;

    // library_bytes, and behind them room for what is rounded or widened there.
    static int64_t workspace_bytes(const GemmShape& shape);

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// What was chosen in this process, as (description, algorithm) strings for a file. A description names the version of
// the library and the kind of GPU, so a choice that does not fit is never used. Import before planning.
std::vector<std::pair<std::string, std::string>> exported_choices();
void import_choices(const std::vector<std::pair<std::string, std::string>>& choices);

// The largest power of two up to 256 that `address` is a multiple of.
int64_t alignment_of(uintptr_t address);

constexpr int64_t round_up(int64_t bytes, int64_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

}  // namespace surogate
