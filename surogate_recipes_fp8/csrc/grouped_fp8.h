// Products of groups of rows with FP8 operands by CUTLASS, for the SM90 (H100, H200) alone: those of experts, for instance. Rows
// are sorted by group, and group g has the rows from ends[g - 1] to ends[g].
//
//   d [rows,width] = a [rows,terms] b_g^T times the scales of a and b, + a2 [rows,terms2] b2_g^T, or + bias_g [width]
//
// b_g is [width,terms]. The groups' are one above another, b [groups*width,terms], or `beside` each other, b [width,groups*terms]:
// the transposed copy of a stack [groups*terms,width]. a and b are E4M3 or E5M2, d and bias [groups,width] bf16, all row-major,
// contiguous, aligned to 16 bytes; terms is a multiple of 16, width of 8. A scale is fp32 [2], (decode, encode). Sums are fp32, or
// with `fast` those of the tensor cores, of 14 bits, and are rounded once. a2 and b2 are the operands of adapters, bf16: b2_g is
// [width,terms2], or where a is E5M2 stored as its transpose, [terms2,width]; the groups' are one above another, and terms2 is a
// multiple of 8. Of some groups b alone is of these, and other rows of d are left as they are. Results repeat. `ends` is read on
// the device, so a launch is the same for all groups and can be captured.
//
// FLOPs: 2 rows width terms, and those of 64 rows more for each group on average, because tiles have rows of one group. Bytes: each
// operand once. Weights of 128 experts [1536,2048] are 403 MB, 0.12 ms on an H100: with 256 rows a group (206 GFLOP, 0.10 ms at
// the dense rate) they limit the product. With 1,024 rows it is 1.07 GB, 0.32 ms, and 825 GFLOP, 0.42 ms.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "surogate/groups.h"

namespace surogate {

struct GroupedFp8Shape {
    int64_t rows, width, terms, groups;
    int dtype_a, dtype_b;  // of <surogate/dtype.h>
    bool beside, fast;
    int64_t terms2;  // 0: nothing is added, and a2 and b2 are not read
    int64_t begin;   // b has the matrices of `groups` groups from this one on; all else is of all groups
};

struct GroupedFp8Buffers {
    const void *a, *b;
    const float *scale_a, *scale_b;
    const int32_t* ends;
    const void *a2, *b2, *bias;  // bias: nullptr, or of a product of a in E4M3 that adds no other
    void *d, *workspace;
};

class GroupedFp8 {
public:
    // Prepares the launch. Throws std::invalid_argument if the shape or a pointer is not supported, and
    // std::runtime_error on another GPU, or if the module was compiled without SM90a.
    GroupedFp8(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers);
    ~GroupedFp8();
    GroupedFp8(const GroupedFp8&) = delete;
    GroupedFp8& operator=(const GroupedFp8&) = delete;

    static constexpr int64_t factor_bytes = workspace_alignment;  // at the start of the workspace: the factor of all sums
    static int64_t workspace_bytes(int64_t groups) { return factor_bytes + groups_bytes(groups); }

    // Enqueues two kernels.
    void run(cudaStream_t stream) const;

    struct Impl {
        virtual ~Impl() = default;
        virtual void run(cudaStream_t stream) const = 0;
    };

private:
    std::unique_ptr<Impl> impl_;
};

// Defined in sm90a/.
std::unique_ptr<GroupedFp8::Impl> make_grouped_fp8(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers);

}  // namespace surogate
