// A main loop of CUTLASS for groups that adds two products in the same accumulators: tiles of the first pair of operands of a
// group, then tiles of the second, if there is one. Only the producer knows of two pairs; the consumers see one sequence of
// stages.
#pragma once

#include <cutlass/gemm/collective/collective_builder.hpp>

namespace surogate {

// `Base`: a CollectiveMma for groups on the SM90 that loads both operands by TMA. The K of a group's shape is
// tile_k * (tiles of both pairs). Elements beyond an operand are loaded as 0.
template <class Base>
struct PairedGroups : Base {
    using typename Base::MainloopPipeline;
    using typename Base::PipelineState;
    using typename Base::TensorStorage;
    static constexpr int tile_k = cute::size<2>(typename Base::TileShape{});

    // Terms are those of all groups; 0 of the second pair: there is none. processors: of the device.
    struct Arguments {
        typename Base::Arguments first{}, second{};
        int first_terms = 0, second_terms = 0, processors = 0;
    };

    struct Params : Base::Params {
        typename Base::Params second;
        int first_terms, second_terms;
    };

    struct TensorMapStorage : cute::aligned_struct<128, cute::_0> {
        typename Base::TensorMapStorage first, second;
    };

    static CUTLASS_HOST_DEVICE int tiles(int terms) { return (terms + tile_k - 1) / tile_k; }

    // The K of the shapes of groups.
    static CUTLASS_HOST_DEVICE int padded_terms(int first, int second) { return (tiles(first) + tiles(second)) * tile_k; }

    template <class Problem>
    static Params to_underlying_arguments(const Problem& problem, const Arguments& arguments, void* workspace) {
        char* behind = static_cast<char*>(workspace) + Base::get_workspace_size(problem, arguments.first, arguments.processors);
        return {{Base::to_underlying_arguments(problem, arguments.first, workspace)},
                Base::to_underlying_arguments(problem, arguments.second, behind),
                arguments.first_terms,
                arguments.second_terms};
    }

    template <class Problem>
    static size_t get_workspace_size(const Problem& problem, const Arguments& arguments, int processors) {
        return 2 * Base::get_workspace_size(problem, arguments.first, processors);
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
        const auto first = Base::load_init(with_terms(shape, params.first_terms), params);
        const auto second = Base::load_init(with_terms(shape, params.second_terms), params.second);
        return cute::make_tuple(cute::get<0>(first), cute::get<1>(first), cute::get<0>(second), cute::get<1>(second));
    }

    // The tiles are those from 0 on: the scheduler does not divide a sum among blocks.
    template <class Inputs, class Maps, class Coord, class Iterator>
    CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState state, const Inputs& inputs,
                             const Maps& maps, const Coord& coord, Iterator tile, int, int thread, uint32_t rank,
                             TensorStorage& storage) {
        using cute::get;
        const int first = tiles(params.first_terms), second = tiles(params.second_terms);
        Base::load(params, pipeline, state, cute::make_tuple(get<0>(inputs), get<1>(inputs)), first_of(maps), coord, tile,
                   first, thread, rank, storage);
        if (second > 0) {
            state.advance(first);
            Base::load(params.second, pipeline, state, cute::make_tuple(get<2>(inputs), get<3>(inputs)), second_of(maps),
                       coord, tile, second, thread, rank, storage);
        }
    }

    // Descriptors of the second pair lie behind those of the first, so their place has the same index.
    CUTLASS_DEVICE auto tensormaps_init(const Params& params, TensorMapStorage& storage, int32_t processors, int32_t at) {
        const auto first = Base::tensormaps_init(params, storage.first, processors, at);
        const auto second = Base::tensormaps_init(params.second, storage.second, processors, at);
        return cute::make_tuple(cute::get<0>(first), cute::get<1>(first), cute::get<0>(second), cute::get<1>(second));
    }

    template <class Maps, class Shape>
    CUTLASS_DEVICE void tensormaps_perform_update(TensorMapStorage& storage, const Params& params, const Maps& maps,
                                                  const Shape& shape, int32_t group) {
        Base::tensormaps_perform_update(storage.first, params, first_of(maps), with_terms(shape, params.first_terms), group);
        if (params.second_terms > 0) {
            Base::tensormaps_perform_update(storage.second, params.second, second_of(maps),
                                            with_terms(shape, params.second_terms), group);
        }
    }

    template <class Maps>
    CUTLASS_DEVICE void tensormaps_cp_fence_release(TensorMapStorage& storage, const Maps& maps) {
        Base::tensormaps_cp_fence_release(storage.first, first_of(maps));
        Base::tensormaps_cp_fence_release(storage.second, second_of(maps));
    }

    template <class Maps>
    CUTLASS_DEVICE void tensormaps_fence_acquire(const Maps& maps) {
        Base::tensormaps_fence_acquire(first_of(maps));
        Base::tensormaps_fence_acquire(second_of(maps));
    }

private:
    template <class Shape>
    static CUTLASS_DEVICE auto with_terms(Shape shape, int terms) {
        cute::get<2>(shape) = terms;
        return shape;
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
