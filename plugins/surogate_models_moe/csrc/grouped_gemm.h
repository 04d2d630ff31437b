// Products of the experts of a layer by CUTLASS, for the SM90 (H100, H200) alone. Rows are sorted by expert, and expert e has
// the rows from ends[e - 1] to ends[e]; w holds the [n,k] of each expert, one above another.
//
//   forward   y [rows,n]        = x [rows,k] w_e^T, + the bias [n] of the expert with `bias` [of,n], before it is rounded
//   dgrad     dx [rows,k]       = dy [rows,n] w_e
//   wgrad     dw [experts*n,k]  = dy_e^T x_e, bf16 or fp32; in fp32 also += with `accumulate`
//
// All else is bf16, row-major, contiguous, aligned to 16 bytes; n and k are multiples of 8. Sums are fp32 and are rounded
// once. Results repeat. `ends` is read on the device, so a launch is the same for all routes and can be captured.
//
// FLOPs: 2 rows n k, and those of 64 to 128 rows more for each expert, because tiles have rows of one expert. Bytes: each
// operand once; dw 2 or 4 experts n k, read too where it accumulates. Weights of 128 experts [1536,2048] are 805 MB, 0.24 ms
// on an H100: with 256 rows an expert, forward can reach 0.8 of the rate of a dense product at most.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "surogate/groups.h"

namespace surogate {

enum Grouped : int { FORWARD = 0, DGRAD = 1, WGRAD = 2 };

struct GroupedShape {
    int64_t rows, n, k, experts;
    int kind;
    int dtype_d;  // of <surogate/dtype.h>
    bool accumulate;
    int64_t terms2 = 0;  // of the second pair of operands; 0: there is none
    int64_t begin = 0, of = 0;  // not in wgrad: w has `experts` of `of` experts, from `begin` on; of 0: all
};

// a: x, or dy; b: w, or x in wgrad; d: y, dx or dw; `workspace` has groups_bytes(experts). Of some experts b and b2 are those
// of these, all else is of all, and other rows of d are left as they are. A bias is of forward without a second pair; nullptr:
// none.
struct GroupedBuffers {
    const void *a, *b, *a2, *b2, *bias;
    const int32_t* ends;
    void *d, *workspace;
};

class GroupedGemm {
public:
    // Prepares the launch. Throws std::invalid_argument if the shape or a pointer is not supported, and
    // std::runtime_error on another GPU, or if the module was compiled without SM90a.
    GroupedGemm(const GroupedShape& shape, const GroupedBuffers& buffers);
    ~GroupedGemm();
    GroupedGemm(const GroupedGemm&) = delete;
    GroupedGemm& operator=(const GroupedGemm&) = delete;

    // Enqueues two kernels, and a third one where wgrad does not accumulate.
    void run(cudaStream_t stream) const;

    struct Impl {
        virtual ~Impl() = default;
        virtual void run(cudaStream_t stream) const = 0;
    };

private:
    std::unique_ptr<Impl> impl_;
};

// Throws std::invalid_argument if a shape or a pointer is not what is described above.
void check_grouped(const GroupedShape& shape, const void* a, const void* b, const void* ends, const void* d);

// Defined in sm90a/.
std::unique_ptr<GroupedGemm::Impl> make_grouped_gemm(const GroupedShape& shape, const GroupedBuffers& buffers);

}  // namespace surogate
