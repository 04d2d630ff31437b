// The kernels of GroupedFp8 by CUTLASS, half of a tile for each of two groups of warps. The groups are what a small kernel writes
// from `ends`: shape, pointers and strides of each. A group without rows has no tiles.
//
// With fast sums tiles are 128 x 256 x 128, those of the bf16 products in bytes. Exact sums are added up a second time, in as many
// registers again: only tiles of 128 x 128 x 128 leave room for them. Pairs of blocks beside each other share the tiles of A: of
// blocks below each other, which would share those of B, 128 rows are lost to a group on average instead of 64.
//
// A tile of the second pair has 64 terms in bf16, as many bytes as 128 in FP8. The sums are multiplied by the scales before
// its products are added, so they are rounded once. Forward b2 is stored like b, and where a is E5M2 as its transpose.
#include <cuda_runtime.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include <memory>
#include <string>
#include <type_traits>

#include "grouped_fp8.h"
#include "surogate/check.h"
#include "surogate/cutlass_groups.cuh"
#include "surogate/dtype.h"
#include "surogate/paired_groups.cuh"

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
using First = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, A, RowMajor*, alignment, B, ColumnMajor*, alignment, float,
    typename Sums::Tile, Pair,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue<Sums>::SharedStorage))>,
    typename Sums::Schedule>::CollectiveOp;

template <class A>
constexpr bool is_transposed = std::is_same_v<A, cutlass::float_e5m2_t>;  // b2

template <class Tile>
using HalfTile = decltype(cute::make_shape(cute::get<0>(Tile{}), cute::get<1>(Tile{}), cute::_64{}));

template <class A, class Sums>
using Second = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, D, RowMajor*, alignment_d, D,
    std::conditional_t<is_transposed<A>, RowMajor, ColumnMajor>*, alignment_d, float, HalfTile<typename Sums::Tile>, Pair,
    cutlass::gemm::collective::StageCount<First<A, Sums>::DispatchPolicy::Stages>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;

template <class A, class Sums>
struct Mainloop : PairedGroups<First<A, Sums>, Second<A, Sums>> {
    using Product = First<A, Sums>;
    using Added = Second<A, Sums>;
    using Paired = PairedGroups<Product, Added>;
    using typename Paired::MainloopPipeline;
    using typename Paired::PipelineState;
    using typename Paired::TensorStorage;

    // factor: of the sums of the first pair, in memory of the device.
    struct Arguments : Paired::Arguments {
        const float* factor = nullptr;
    };

    struct Params : Paired::Params {
        const float* factor;
    };

    template <class Problem>
    static Params to_underlying_arguments(const Problem& problem, const Arguments& arguments, void* workspace) {
        return {Paired::to_underlying_arguments(problem, arguments, workspace), arguments.factor};
    }

    template <class Accumulators>
    CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Accumulators& sums, int, int thread,
                            TensorStorage& storage, const Params& params) {
        const int first = Paired::template tiles<Product>(params.first_terms);
        Product::mma(pipeline, state, sums, first, thread, storage, params);
        Product::mma_tail(pipeline, state, first);
        cute::warpgroup_fence_operand(sums);
        const float factor = *params.factor;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < cute::size(sums); ++i) {
            sums(i) *= factor;
        }
        state.advance(first);
        add(pipeline, state, sums, Paired::template tiles<Added>(params.second_terms), thread,
            reinterpret_cast<typename Added::TensorStorage&>(storage));
    }

    // All stages are released.
    CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}

private:
    // Adds the products of `count` tiles of the second pair. There is one, where adapters have at most 64 ranks.
    template <class Accumulators>
    static CUTLASS_DEVICE void add(MainloopPipeline pipeline, PipelineState state, Accumulators& sums, int count, int thread,
                                   typename Added::TensorStorage& storage) {
        using cute::_;
        const auto a = cute::make_tensor(cute::make_smem_ptr(storage.smem_A.data()), typename Added::SmemLayoutA{});
        const auto b = cute::make_tensor(cute::make_smem_ptr(storage.smem_B.data()), typename Added::SmemLayoutB{});
        typename Added::TiledMma mma;
        mma.accumulate_ = cute::GMMA::ScaleOut::One;
        const int warp_group = __shfl_sync(0xffffffff, thread / cutlass::NumThreadsPerWarpGroup, 0);
        const auto part = mma.get_slice(warp_group * cutlass::NumThreadsPerWarpGroup);
        const auto part_a = part.make_fragment_A(part.partition_A(a));
        const auto part_b = part.make_fragment_B(part.partition_B(b));
        for (; count > 0; --count) {
            pipeline.consumer_wait(state);
            cute::warpgroup_fence_operand(sums);
            cute::warpgroup_arrive();
            cute::gemm(mma, part_a(_, _, _, state.index()), part_b(_, _, _, state.index()), sums);
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
            cute::warpgroup_fence_operand(sums);
            pipeline.consumer_release(state);
            ++state;
        }
    }
};

template <class A, class Sums>
using Kernel = cutlass::gemm::kernel::GemmUniversal<GroupProblem, Mainloop<A, Sums>, Epilogue<Sums>>;

// Those of kernels with other sums are the same.
template <class A>
using Groups = CutlassGroups<Kernel<A, Exact>>;

template <class A>
using Others = SecondOperands<Second<A, Exact>>;

// A thread per group. Bytes: about 60 a group, 90 with a second pair.
template <class A>
__global__ void groups_kernel(float* factor, Groups<A> groups, Others<A> others, const A* a, const B* b, const D* a2,
                              const D* b2, D* d, const float* scale_a, const float* scale_b, const int32_t* ends, int width,
                              int terms, int terms2, int count, bool beside) {
    const int g = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (g >= count) {
        return;
    }
    if (g == 0) {
        *factor = __fmul_rn(scale_a[0], scale_b[0]);
    }
    const int first = g == 0 ? 0 : ends[g - 1];
    const int64_t start = first, between = beside ? terms : static_cast<int64_t>(width) * terms;
    groups.shapes[g] = cute::make_shape(ends[g] - first, width, Mainloop<A, Exact>::padded_terms(terms, terms2));
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
    if (terms2 > 0) {
        using cute::make_shape;
        others.a[g] = a2 + start * terms2;
        others.b[g] = b2 + static_cast<int64_t>(g) * width * terms2;
        others.stride_a[g] =
            cutlass::make_cute_packed_stride(typename Second<A, Exact>::InternalStrideA{}, make_shape(width, terms2, 1));
        others.stride_b[g] =
            cutlass::make_cute_packed_stride(typename Second<A, Exact>::InternalStrideB{}, make_shape(width, terms2, 1));
    }
}

template <class A, class Sums>
struct Prepared : GroupedFp8::Impl {
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel<A, Sums>>;

    Prepared(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers)
        : shape(shape),
          buffers(buffers),
          factor(static_cast<float*>(buffers.workspace)),
          at(static_cast<char*>(buffers.workspace) + GroupedFp8::factor_bytes),
          groups(at, shape.groups),
          others(at, shape.groups) {
        auto arguments = group_arguments<Gemm>(groups, shape.groups, op_name);
        arguments.epilogue.thread.alpha = 1.0f;
        arguments.epilogue.thread.beta = 0.0f;
        auto& loop = arguments.mainloop;
        loop.second = {others.a, others.stride_a, others.b, others.stride_b};
        loop.first_terms = static_cast<int>(shape.terms);
        loop.second_terms = static_cast<int>(shape.terms2);
        loop.processors = arguments.hw_info.sm_count;
        loop.factor = factor;
        const char* end = static_cast<char*>(buffers.workspace) + GroupedFp8::workspace_bytes(shape.groups);
        initialize(gemm, arguments, at, end, op_name);
    }

    void run(cudaStream_t stream) const override {
        const int count = static_cast<int>(shape.groups);
        groups_kernel<A><<<(count + 127) / 128, 128, 0, stream>>>(
            factor, groups, others, static_cast<const A*>(buffers.a), static_cast<const B*>(buffers.b),
            static_cast<const D*>(buffers.a2), static_cast<const D*>(buffers.b2), static_cast<D*>(buffers.d), buffers.scale_a,
            buffers.scale_b, buffers.ends, static_cast<int>(shape.width), static_cast<int>(shape.terms),
            static_cast<int>(shape.terms2), count, shape.beside);
        check_launch(op_name);
        check_status(gemm.run(stream), op_name, "run");
    }

    GroupedFp8Shape shape;
    GroupedFp8Buffers buffers;
    float* factor;  // of all sums
    char* at;
    Groups<A> groups;
    Others<A> others;
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
