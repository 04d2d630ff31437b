// The sum of two products, for the SM90 (H100, H200) alone:
//
//   D [m,n] = A [m,k] B + A2 [m,k2] B2
//
// bf16, row-major, contiguous, aligned to 16 bytes; n, k and k2 are multiples of 8. B is stored as [k,n], or as [n,k] with
// `transposed`, and B2 alike. Sums are fp32 and D is rounded once.
//
// A low-rank adapter's branch (k2 = 16 to 192) costs one or a few steps of the main loop this way: no other kernel writes
// it to D, and the product does not read D. Results repeat. The tiling follows from the shape and the number of
// multiprocessors; nothing is timed.
//
// FLOPs: 2mn(k + k2), where k and k2 count as multiples of 64.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

namespace surogate {

struct PairShape {
    int64_t m, n, k, k2;
    bool transposed;
};

struct PairBuffers {
    const void *a, *b, *a2, *b2;
    void* d;
};

class PairGemm {
public:
    // Prepares the launch. Throws std::invalid_argument if the shape or a pointer is not supported, and
    // std::runtime_error on another GPU, or if the module was compiled without SM90a.
    PairGemm(const PairShape& shape, const PairBuffers& buffers);
    ~PairGemm();
    PairGemm(const PairGemm&) = delete;
    PairGemm& operator=(const PairGemm&) = delete;

    // Enqueues one kernel.
    void run(cudaStream_t stream) const;

    struct Impl {
        virtual ~Impl() = default;
        virtual void run(cudaStream_t stream) const = 0;
    };

private:
    std::unique_ptr<Impl> impl_;
};

// Defined in sm90a/pair_gemm.cu.
std::unique_ptr<PairGemm::Impl> make_pair_gemm(const PairShape& shape, const PairBuffers& buffers);

}  // namespace surogate
