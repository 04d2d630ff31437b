// A main loop of CUTLASS for groups that adds two products in the same accumulators: tiles of the first pair of operands of a
// group, then tiles of the second, if there is one. Only the producer knows of two pairs; consumers of operands of one dtype
// see one sequence of stages.
#pragma once

#include <cutlass/gemm/collective/collective_builder.hpp>

#include "surogate/cutlass_groups.cuh"

namespace surogate {

// Pointers and strides of the second pair of operands of each group.
template <class Second>
struct SecondOperands {
    const typename Second::ElementA** a;
    const typename Second::ElementB** b;
    typename Second::InternalStrideA* stride_a;
    typename Second::InternalStrideB* stride_b;

    // Places the arrays one after another and moves `at` past them.
    SecondOperands(char*& at, int64_t groups) {
        place(a, at, groups);
        place(b, at, groups);
        place(stride_a, at, groups);
        place(stride_b, at, groups);
    }
};

// `First`, `Second`: CollectiveMma for groups on the SM90 that load both operands by TMA, with tiles of as many bytes. The K of
// a group's shape is that of padded_terms. Elements beyond an operand are loaded as 0.
template <class First, class Second = First>
struct PairedGroups : First {
    using typename First::MainloopPipeline;
    using typename First::PipelineState;
    using typename First::TensorStorage;
    using SecondStorage = typename Second::TensorStorage;
    static_assert(std::is_same_v<MainloopPipeline, typename Second::MainloopPipeline> &&
                  sizeof(TensorStorage) == sizeof(SecondStorage) && First::TmaTransactionBytes == Second::TmaTransactionBytes);

    // Terms are those of all groups; 0 of the second pair: there is none. processors: of the device.
    struct Arguments {
        typename First::Arguments first{};
        typename Second::Arguments second{};
        int first_terms = 0, second_terms = 0, processors = 0;
    };

    struct Params : First::Params {
        typename Second::Params second;
        int first_terms, second_terms;
    };

    struct TensorMapStorage : cute::aligned_struct<128, cute::_0> {
        typename First::TensorMapStorage first;
        typename Second::TensorMapStorage second;
    };

    template <class Product>
    static CUTLASS_HOST_DEVICE int tiles(int terms) {
        constexpr int of_tile = cute::size<2>(typename Product::TileShape{});
        return (terms + of_tile - 1) / of_tile;
    }

    // The K of the shapes of groups.
    static CUTLASS_HOST_DEVICE int padded_terms(int first, int second) {
        return (tiles<First>(first) + tiles<Second>(second)) * static_cast<int>(cute::size<2>(typename First::TileShape{}));
    }

    template <class Problem>
    static Params to_underlying_arguments(const Problem& problem, const Arguments& arguments, void* workspace) {
        char* behind = static_cast<char*>(workspace) + First::get_workspace_size(problem, arguments.first, arguments.processors);
        return {{First::to_underlying_arguments(problem, arguments.first, workspace)},
                Second::to_underlying_arguments(problem, arguments.second, behind),
                arguments.first_terms,
                arguments.second_terms};
    }

    template <class Problem>
    static size_t get_workspace_size(const Problem& problem, const Arguments& arguments, int processors) {
        return 2 * First::get_workspace_size(problem, arguments.first, processors);
    }

    template <class Problem>
    static cutlass::Status initialize_workspace(const Problem&, const Arguments&, void*, cudaStream_t,
                                                cutlass::CudaHostAdapter* = nullptr) {
        return cutlass::Status::kSuccess;
    }

    // Shapes and alignment are checked by the caller.
    template <class Problem>
    static bool can_implement(const Problem&, const Arguments&) {
        return true;
    }

    template <class Shape>
    CUTLASS_DEVICE auto load_init(const Shape& shape, const Params& params) const {
        const auto first = First::load_init(with_terms(shape, params.first_terms), params);
        const auto second = Second{}.load_init(with_terms(shape, params.second_terms), params.second);
        return cute::make_tuple(cute::get<0>(first), cute::get<1>(first), cute::get<0>(second), cute::get<1>(second));
    }

    // The tiles are those from 0 on: the scheduler does not divide a sum among blocks.
    template <class Inputs, class Maps, class Coord, class Iterator>
    CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState state, const Inputs& inputs,
                             const Maps& maps, const Coord& coord, Iterator tile, int, int thread, uint32_t rank,
                             TensorStorage& storage) {
        using cute::get;
        const int first = tiles<First>(params.first_terms), second = tiles<Second>(params.second_terms);
        First::load(params, pipeline, state, cute::make_tuple(get<0>(inputs), get<1>(inputs)), first_of(maps), coord, tile,
                    first, thread, rank, storage);
        if (second > 0) {
            state.advance(first);
            Second{}.load(params.second, pipeline, state, cute::make_tuple(get<2>(inputs), get<3>(inputs)), second_of(maps),
                         coord, tile, second, thread, rank, reinterpret_cast<SecondStorage&>(storage));
        }
    }

    // Descriptors of the second pair follow those of the first, so their place has the same index.
    CUTLASS_DEVICE auto tensormaps_init(const Params& params, TensorMapStorage& storage, int32_t processors, int32_t at) {
        const auto first = First::tensormaps_init(params, storage.first, processors, at);
        cute::TmaDescriptor* none = nullptr;
        auto second = cute::make_tuple(none, none);
        if (params.second_terms > 0) {
            second = Second{}.tensormaps_init(params.second, storage.second, processors, at);
        }
        return cute::make_tuple(cute::get<0>(first), cute::get<1>(first), cute::get<0>(second), cute::get<1>(second));
    }

    template <class Maps, class Shape>
    CUTLASS_DEVICE void tensormaps_perform_update(TensorMapStorage& storage, const Params& params, const Maps& maps,
                                                  const Shape& shape, int32_t group) {
        First::tensormaps_perform_update(storage.first, params, first_of(maps), with_terms(shape, params.first_terms), group);
        if (params.second_terms > 0) {
            Second{}.tensormaps_perform_update(storage.second, params.second, second_of(maps),
                                               with_terms(shape, params.second_terms), group);
        }
    }

    template <class Maps>
    CUTLASS_DEVICE void tensormaps_cp_fence_release(TensorMapStorage& storage, const Maps& maps) {
        First::tensormaps_cp_fence_release(storage.first, first_of(maps));
        if (has_second(maps)) {
            Second{}.tensormaps_cp_fence_release(storage.second, second_of(maps));
        }
    }

    template <class Maps>
    CUTLASS_DEVICE void tensormaps_fence_acquire(const Maps& maps) {
        First::tensormaps_fence_acquire(first_of(maps));
        if (has_second(maps)) {
            Second{}.tensormaps_fence_acquire(second_of(maps));
        }
    }

private:
    template <class Shape>
    static CUTLASS_DEVICE auto with_terms(Shape shape, int terms) {
        cute::get<2>(shape) = terms;
        return shape;
    }

    template <class Maps>
    static CUTLASS_DEVICE bool has_second(const Maps& maps) {
        return cute::get<2>(maps) != nullptr;
    }

    template <class Maps>
    static CUTLASS_DEVICE auto first_of(const Maps& maps) {
        return cute::make_tuple(cute::get<0>(maps), cute::get<1>(maps));
    }

    template <class Maps>
    static CUTLASS_DEVICE auto second_of(const Maps& maps) {
        return cute::make_tuple(cute::get<2>(maps), cute::get<3>(maps));
    }
};

}  // namespace surogate
