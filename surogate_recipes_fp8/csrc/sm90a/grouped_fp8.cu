// The kernels of GroupedFp8 by CUTLASS, half of a tile for each of two groups of warps. The groups are what a small kernel writes
// from `ends`: shape, pointers and strides of each. A group without rows has no tiles.
//
// With fast sums tiles are 128 x 256 x 128, those of the bf16 products in bytes. Exact sums are added up a second time, in as many
// registers again: only tiles of 128 x 128 x 128 leave room for them. Pairs of blocks beside each other share the tiles of A: of
// blocks below each other, which would share those of B, 128 rows are lost to a group on average instead of 64.
//
// A tile of the second pair has 64 terms in bf16, as many bytes as 128 in FP8. The sums are multiplied by the scales before
// its products are added, so they are rounded once. Forward b2 is stored like b, and where a is E5M2 as its transpose. A bias is
// added by the epilogue.
#include <cuda_runtime.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_compute_tma_warpspecialized.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp>
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
using E4m3 = cutlass::float_e4m3_t;
using E5m2 = cutlass::float_e5m2_t;
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

constexpr int alignment = 16, alignment_d = 16 / sizeof(D);

// From an array of pointers, one of each group, in fp32. Where there is no array it is 0.
template <class Sums>
using BiasOfGroup = cutlass::epilogue::fusion::Sm90RowBroadcast<0, typename Sums::Tile, D*, float>;

constexpr auto round_to_nearest = cutlass::FloatRoundStyle::round_to_nearest;

// What the epilogue computes of the sums.
template <class Sums, bool Biased>
using Computed = std::conditional_t<
    Biased,
    cutlass::epilogue::fusion::Sm90EVT<cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, D, float, round_to_nearest>,
                                       BiasOfGroup<Sums>, cutlass::epilogue::fusion::Sm90AccFetch>,
    cutlass::epilogue::fusion::LinearCombination<D, float, void, float, round_to_nearest>>;

template <class Sums, bool Biased>
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Sums::Tile, Pair,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor*, alignment_d, D, RowMajor*, alignment_d,
    cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative, Computed<Sums, Biased>>::CollectiveOp;

// The dtypes of a and b, and whether the epilogue knows a bias.
template <class A_, class B_, class Sums_, bool Biased_>
struct Kind {
    using A = A_;
    using B = B_;
    using Sums = Sums_;
    static constexpr bool biased = Biased_;
    static constexpr bool transposed = std::is_same_v<A, E5m2>;  // b2
    using Epilogue = surogate::Epilogue<Sums, biased>;
};

template <class Kind>
using First = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Kind::A, RowMajor*, alignment, typename Kind::B, ColumnMajor*,
    alignment, float, typename Kind::Sums::Tile, Pair,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Kind::Epilogue::SharedStorage))>,
    typename Kind::Sums::Schedule>::CollectiveOp;

template <class Tile>
using HalfTile = decltype(cute::make_shape(cute::get<0>(Tile{}), cute::get<1>(Tile{}), cute::_64{}));

template <class Kind>
using Second = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, D, RowMajor*, alignment_d, D,
    std::conditional_t<Kind::transposed, RowMajor, ColumnMajor>*, alignment_d, float, HalfTile<typename Kind::Sums::Tile>, Pair,
    cutlass::gemm::collective::StageCount<First<Kind>::DispatchPolicy::Stages>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;

template <class Kind>
struct Mainloop : PairedGroups<First<Kind>, Second<Kind>> {
    using Product = First<Kind>;
    using Added = Second<Kind>;
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

template <class Kind>
using Kernel = cutlass::gemm::kernel::GemmUniversal<GroupProblem, Mainloop<Kind>, typename Kind::Epilogue>;

template <class Kind>
using Groups = CutlassGroups<Kernel<Kind>>;

template <class Kind>
using Others = SecondOperands<Second<Kind>>;

// A thread per group, of those from `begin` on. Bytes: about 60 a group, 90 with a second pair. A bias, of a product without one,
// is held in its place.
template <class Kind>
__global__ void groups_kernel(float* factor, Groups<Kind> groups, Others<Kind> others, const typename Kind::A* a,
                              const typename Kind::B* b, const D* a2, const D* b2, const D* bias, D* d, const float* scale_a,
                              const float* scale_b, const int32_t* ends, int width, int terms, int terms2, int begin,
                              int count, bool beside) {
    const int g = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (g >= count) {
        return;
    }
    if (g == 0) {
        *factor = __fmul_rn(scale_a[0], scale_b[0]);
    }
    const int group = begin + g, first = group == 0 ? 0 : ends[group - 1];
    const int64_t start = first, between = beside ? terms : static_cast<int64_t>(width) * terms;
    groups.shapes[g] = cute::make_shape(ends[group] - first, width, Mainloop<Kind>::padded_terms(terms, terms2));
    groups.a[g] = a + start * terms;
    groups.b[g] = b + g * between;
    groups.d[g] = d + start * width;
    typename Groups<Kind>::StrideA stride_a{};
    typename Groups<Kind>::StrideB stride_b{};
    typename Groups<Kind>::StrideD stride_d{};
    cute::get<0>(stride_a) = terms;
    cute::get<0>(stride_b) = beside ? static_cast<int64_t>(count) * terms : terms;
    cute::get<0>(stride_d) = width;
    groups.stride_a[g] = stride_a;
    groups.stride_b[g] = stride_b;
    groups.stride_d[g] = stride_d;
    if (bias != nullptr) {
        others.b[g] = bias + static_cast<int64_t>(group) * width;
    }
    if (terms2 > 0) {
        using cute::make_shape;
        others.a[g] = a2 + start * terms2;
        others.b[g] = b2 + static_cast<int64_t>(group) * width * terms2;
        others.stride_a[g] =
            cutlass::make_cute_packed_stride(typename Second<Kind>::InternalStrideA{}, make_shape(width, terms2, 1));
        others.stride_b[g] =
            cutlass::make_cute_packed_stride(typename Second<Kind>::InternalStrideB{}, make_shape(width, terms2, 1));
    }
}

template <class Kind>
struct Prepared : GroupedFp8::Impl {
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel<Kind>>;

    Prepared(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers)
        : shape(shape),
          buffers(buffers),
          factor(static_cast<float*>(buffers.workspace)),
          at(static_cast<char*>(buffers.workspace) + GroupedFp8::factor_bytes),
          groups(at, shape.groups),
          others(at, shape.groups) {
        auto arguments = group_arguments<Gemm>(groups, shape.groups, op_name);
        if constexpr (Kind::biased) {
            arguments.epilogue.thread = {{buffers.bias == nullptr ? nullptr : others.b, D(0), {}}, {}, {}};
        } else {
            arguments.epilogue.thread.alpha = 1.0f;
            arguments.epilogue.thread.beta = 0.0f;
        }
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
        groups_kernel<Kind><<<(count + 127) / 128, 128, 0, stream>>>(
            factor, groups, others, static_cast<const typename Kind::A*>(buffers.a),
            static_cast<const typename Kind::B*>(buffers.b), static_cast<const D*>(buffers.a2),
            static_cast<const D*>(buffers.b2), static_cast<const D*>(buffers.bias), static_cast<D*>(buffers.d), buffers.scale_a,
            buffers.scale_b, buffers.ends, static_cast<int>(shape.width), static_cast<int>(shape.terms),
            static_cast<int>(shape.terms2), static_cast<int>(shape.begin), count, shape.beside);
        check_launch(op_name);
        check_status(gemm.run(stream), op_name, "run");
    }

    GroupedFp8Shape shape;
    GroupedFp8Buffers buffers;
    float* factor;  // of all sums
    char* at;
    Groups<Kind> groups;
    Others<Kind> others;
    mutable Gemm gemm;
};

}  // namespace

// Another kernel takes 11 s to compile. So sums of gradients are exact with `fast` too, which they seldom are, and those of
// weights in E5M2 know a bias without having one.
std::unique_ptr<GroupedFp8::Impl> make_grouped_fp8(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers) {
    const auto make = [&](auto kind) -> std::unique_ptr<GroupedFp8::Impl> {
        return std::make_unique<Prepared<decltype(kind)>>(shape, buffers);
    };
    if (shape.dtype_b == E5M2) {
        return shape.dtype_a == E5M2 ? make(Kind<E5m2, E5m2, Exact, false>{})
               : shape.fast          ? make(Kind<E4m3, E5m2, Fast, true>{})
                                     : make(Kind<E4m3, E5m2, Exact, true>{});
    }
    if (shape.dtype_a == E5M2) {
        return make(Kind<E5m2, E4m3, Exact, false>{});
    }
    if (buffers.bias != nullptr) {
        return shape.fast ? make(Kind<E4m3, E4m3, Fast, true>{}) : make(Kind<E4m3, E4m3, Exact, true>{});
    }
    return shape.fast ? make(Kind<E4m3, E4m3, Fast, false>{}) : make(Kind<E4m3, E4m3, Exact, false>{});
}

}  // namespace surogate
