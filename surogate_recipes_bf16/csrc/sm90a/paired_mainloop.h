// A main loop of CUTLASS that adds two products in the same accumulators: tiles of the first pair of operands, then
// tiles of the second. Only the producer knows of two pairs; the consumers see one sequence of stages.
#pragma once

#include <cutlass/gemm/collective/collective_builder.hpp>

namespace surogate {

// `Base`: a CollectiveMma for SM90 that loads both operands by TMA. The K of the problem that a kernel is launched with is
// tile_k * (tiles of both pairs). Elements beyond an operand are loaded as 0.
template <class Base>
struct PairedMainloop : Base {
    using typename Base::MainloopPipeline;
    using typename Base::PipelineState;
    using typename Base::TensorStorage;
    static constexpr int tile_k = cute::size<2>(typename Base::TileShape{});

    struct Operands {
        const typename Base::ElementA* a;
        typename Base::StrideA stride_a;
        const typename Base::ElementB* b;
        typename Base::StrideB stride_b;
        int k;
    };

    struct Arguments {
        Operands first, second;
    };

    struct Params : Base::Params {
        typename Base::Params second;
        int first_tiles;
    };

    static int tiles(int k) { return cute::ceil_div(k, tile_k); }

    template <class Shape>
    static Params to_underlying_arguments(const Shape& shape, const Arguments& arguments, void* workspace) {
        const auto params = [&](const Operands& o) {
            auto own = cute::append<4>(shape, 1);
            cute::get<2>(own) = o.k;
            return Base::to_underlying_arguments(own, {o.a, o.stride_a, o.b, o.stride_b}, workspace);
        };
        return {{params(arguments.first)}, params(arguments.second), tiles(arguments.first.k)};
    }

    // Shapes and alignment are checked by the caller.
    template <class Shape>
    static bool can_implement(const Shape&, const Arguments&) {
        return true;
    }

    CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
        Base::prefetch_tma_descriptors(params);
        Base::prefetch_tma_descriptors(params.second);
    }

    template <class Shape>
    CUTLASS_DEVICE auto load_init(const Shape& shape, const Params& params) const {
        const auto first = Base::load_init(shape, params);
        const auto second = Base::load_init(shape, params.second);
        return cute::make_tuple(cute::get<0>(first), cute::get<1>(first), cute::get<0>(second), cute::get<1>(second));
    }

    // The tiles are those from 0 on: the scheduler does not divide a sum among blocks.
    template <class Inputs, class Coord, class Iterator>
    CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline, PipelineState state, const Inputs& inputs,
                             const Coord& coord, Iterator tile, int count, int thread, uint32_t rank,
                             TensorStorage& storage) {
        using cute::get;
        const int first = params.first_tiles;
        Base::load(params, pipeline, state, cute::make_tuple(get<0>(inputs), get<1>(inputs)), coord, tile, first, thread,
                   rank, storage);
        state.advance(first);
        Base::load(params.second, pipeline, state, cute::make_tuple(get<2>(inputs), get<3>(inputs)), coord, tile,
                   count - first, thread, rank, storage);
    }
};

}  // namespace surogate
