// The kernels of GroupedFp8 by CUTLASS, half of a tile for each of two groups of warps. The groups are what a small kernel writes
// from `ends`: shape, pointers and strides of each. A group without rows has no tiles.
//
// With fast sums tiles are 128 x 256 x 128, those of the bf16 products in bytes. Exact sums are added up a second time, in as many
// registers again: only tiles of 128 x 128 x 128 leave room for them. Pairs of blocks beside each other share the tiles of A: of
// blocks below each other, which would share those of B, 128 rows are lost to a group on average instead of 64.
#include <cuda_runtime.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <memory>
#include <string>
#include <type_traits>

#include "grouped_fp8.h"
#include "surogate/check.h"
#include "surogate/cutlass_groups.cuh"
#include "surogate/dtype.h"

namespace surogate {
namespace {

constexpr const char* op_name = "grouped_fp8";
using B = cutlass::float_e4m3_t;
using D = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;

using Pair = cute::Shape<cute::_1, cute::_2, cute::_1>;

struct Fast {
    using Tile = cute::Shape<cute::_128, cute::_256, cute::_128>;
    using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8FastAccum;
};

struct Exact {
    using Tile = cute::Shape<cute::_128, cute::_128, cute::_128>;
    using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
};

constexpr int alignment = 16 / sizeof(B), alignment_d = 16 / sizeof(D);

template <class Sums>
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Sums::Tile, Pair,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor*, alignment_d, D, RowMajor*, alignment_d,
    cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;

template <class A, class Sums>
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, A, RowMajor*, alignment, B, ColumnMajor*, alignment, float,
    typename Sums::Tile, Pair,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue<Sums>::SharedStorage))>,
    typename Sums::Schedule>::CollectiveOp;

template <class A, class Sums>
using Kernel = cutlass::gemm::kernel::GemmUniversal<GroupProblem, Mainloop<A, Sums>, Epilogue<Sums>>;

// Those of kernels with other sums are the same.
template <class A>
using Groups = CutlassGroups<Kernel<A, Exact>>;

// A thread per group. Bytes: about 60 a group.
template <class A>
__global__ void groups_kernel(float* factor, Groups<A> groups, const A* a, const B* b, D* d, const float* scale_a,
                              const float* scale_b, const int32_t* ends, int width, int terms, int count, bool beside) {
    const int g = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (g >= count) {
        return;
    }
    if (g == 0) {
        *factor = __fmul_rn(scale_a[0], scale_b[0]);
    }
    const int first = g == 0 ? 0 : ends[g - 1];
    const int64_t start = first, between = beside ? terms : static_cast<int64_t>(width) * terms;
    groups.shapes[g] = cute::make_shape(ends[g] - first, width, terms);
    groups.a[g] = a + start * terms;
    groups.b[g] = b + g * between;
    groups.d[g] = d + start * width;
    typename Groups<A>::StrideA stride_a{};
    typename Groups<A>::StrideB stride_b{};
    typename Groups<A>::StrideD stride_d{};
    cute::get<0>(stride_a) = terms;
    cute::get<0>(stride_b) = beside ? static_cast<int64_t>(count) * terms : terms;
    cute::get<0>(stride_d) = width;
    groups.stride_a[g] = stride_a;
    groups.stride_b[g] = stride_b;
    groups.stride_d[g] = stride_d;
}

template <class A, class Sums>
struct Prepared : GroupedFp8::Impl {
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel<A, Sums>>;

    Prepared(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers)
        : shape(shape),
          buffers(buffers),
          factor(static_cast<float*>(buffers.workspace)),
          at(static_cast<char*>(buffers.workspace) + GroupedFp8::factor_bytes),
          groups(at, shape.groups) {
        auto arguments = group_arguments<Gemm>(groups, shape.groups, op_name);
        arguments.epilogue.thread.alpha_ptr = factor;
        arguments.epilogue.thread.beta = 0.0f;
        const char* end = static_cast<char*>(buffers.workspace) + GroupedFp8::workspace_bytes(shape.groups);
        initialize(gemm, arguments, at, end, op_name);
    }

    void run(cudaStream_t stream) const override {
        const int count = static_cast<int>(shape.groups);
        groups_kernel<A><<<(count + 127) / 128, 128, 0, stream>>>(
            factor, groups, static_cast<const A*>(buffers.a), static_cast<const B*>(buffers.b), static_cast<D*>(buffers.d),
            buffers.scale_a, buffers.scale_b, buffers.ends, static_cast<int>(shape.width), static_cast<int>(shape.terms), count,
            shape.beside);
        check_launch(op_name);
        check_status(gemm.run(stream), op_name, "run");
    }

    GroupedFp8Shape shape;
    GroupedFp8Buffers buffers;
    float* factor;  // of all sums
    char* at;
    Groups<A> groups;
    mutable Gemm gemm;
};

}  // namespace

// Sums of E5M2 are exact with `fast` too: gradients are seldom fast, and another kernel takes 11 s to compile.
std::unique_ptr<GroupedFp8::Impl> make_grouped_fp8(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers) {
    if (shape.dtype_a == E5M2) {
        return std::make_unique<Prepared<cutlass::float_e5m2_t, Exact>>(shape, buffers);
    }
    if (shape.fast) {
        return std::make_unique<Prepared<B, Fast>>(shape, buffers);
    }
    return std::make_unique<Prepared<B, Exact>>(shape, buffers);
}

}  // namespace surogate
