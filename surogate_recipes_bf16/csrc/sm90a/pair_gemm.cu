// PairGemm by CUTLASS, in one of two tilings. Pairs of blocks share the tiles of B.
//
//   wide    tiles of 128 x 256 x 64, half of one for each of two groups of warps
//   narrow  tiles of 128 x 128 x 64; the groups take turns, so that one stores its tile while the other multiplies
//
// LoRA steps of Qwen3-8B and 0.6B on an H200, alternating in one process with two products by cuBLASLt (2026-11-22): wide
// tiles take 0.961 and 0.991 of the time, narrow ones 1.000 and 1.001, tiles of 256 x 128 0.971 and 0.997. (In a loop of one
// product, where the clock is lower, narrow tiles are 2 to 17 % faster.) But tiles are distributed in rounds over the
// multiprocessors, and where few wide tiles are left for the last round, narrow ones win: 4,096 x 2,560, as in Qwen3-4B, has
// 320 wide tiles, 2.4 rounds of 132.
#include <cuda_runtime.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include <string>
#include <type_traits>

#include "pair_gemm.h"
#include "paired_mainloop.h"
#include "surogate/check.h"
#include "surogate/cutlass.h"

namespace surogate {
namespace {

constexpr const char* op_name = "pair_gemm";
using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
constexpr int alignment = 8;  // elements in 16 bytes
constexpr int tile_rows = 128;

struct Wide {
    static constexpr int columns = 256;
    static constexpr double cost = 1.0;  // of a round of tiles, for each of their columns
    using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
    using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

struct Narrow {
    static constexpr int columns = 128;
    static constexpr double cost = 1.06;  // steps of Qwen3-8B, see above: 39 of 678 ms of these products
    using MainloopSchedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
    using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
};

template <class Tiling>
using Tile = cute::Shape<cute::Int<tile_rows>, cute::Int<Tiling::columns>, cute::_64>;

template <class Tiling>
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile<Tiling>, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, alignment, Element, RowMajor, alignment,
    typename Tiling::EpilogueSchedule>::CollectiveOp;

template <class Tiling, class LayoutB>
using Mainloop = PairedMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, alignment, Element, LayoutB, alignment, float,
    Tile<Tiling>, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue<Tiling>::SharedStorage))>,
    typename Tiling::MainloopSchedule>::CollectiveOp>;

template <class Tiling, class LayoutB>
struct Prepared : PairGemm::Impl {
    using Loop = Mainloop<Tiling, LayoutB>;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Loop, Epilogue<Tiling>,
                                                        cutlass::gemm::PersistentScheduler>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    Prepared(const PairShape& shape, const PairBuffers& buffers, const cutlass::KernelHardwareInfo& hardware) {
        const int m = static_cast<int>(shape.m), n = static_cast<int>(shape.n);
        const auto operands = [&](const void* a, const void* b, int64_t k) {
            const int length = static_cast<int>(k);
            return typename Loop::Operands{
                static_cast<const Element*>(a),
                cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, cute::make_shape(m, length, 1)),
                static_cast<const Element*>(b),
                cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, cute::make_shape(n, length, 1)), length};
        };
        const typename Loop::Arguments loop{operands(buffers.a, buffers.b, shape.k),
                                            operands(buffers.a2, buffers.b2, shape.k2)};
        const int tiles = Loop::tiles(loop.first.k) + Loop::tiles(loop.second.k);
        const auto stride = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, cute::make_shape(m, n, 1));
        const typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                                 {m, n, tiles * Loop::tile_k, 1},
                                                 loop,
                                                 {{1.0f, 0.0f}, nullptr, stride, static_cast<Element*>(buffers.d), stride},
                                                 hardware};
        SUROGATE_REQUIRE(Gemm::get_workspace_size(arguments) == 0, op_name, "unexpected workspace");
        check_status(gemm.initialize(arguments, nullptr), op_name, "initialize");
    }

    void run(cudaStream_t stream) const override { check_status(gemm.run(stream), op_name, "run"); }

    mutable Gemm gemm;
};

template <class Tiling>
double estimated_time(const PairShape& shape, int processors) {
    const int64_t tiles = ceil_div(shape.m, tile_rows) * ceil_div(shape.n, Tiling::columns);
    return static_cast<double>(ceil_div(tiles, processors)) * Tiling::columns * Tiling::cost;
}

template <class Tiling>
std::unique_ptr<PairGemm::Impl> prepare(const PairShape& shape, const PairBuffers& buffers,
                                        const cutlass::KernelHardwareInfo& hardware) {
    if (shape.transposed) {
        return std::make_unique<Prepared<Tiling, cutlass::layout::ColumnMajor>>(shape, buffers, hardware);
    }
    return std::make_unique<Prepared<Tiling, RowMajor>>(shape, buffers, hardware);
}

}  // namespace

std::unique_ptr<PairGemm::Impl> make_pair_gemm(const PairShape& shape, const PairBuffers& buffers) {
    cutlass::KernelHardwareInfo hardware;
    check_cuda(cudaGetDevice(&hardware.device_id), op_name);
    check_cuda(cudaDeviceGetAttribute(&hardware.sm_count, cudaDevAttrMultiProcessorCount, hardware.device_id),
               op_name);
    const bool is_wide =
        estimated_time<Wide>(shape, hardware.sm_count) <= estimated_time<Narrow>(shape, hardware.sm_count);
    return is_wide ? prepare<Wide>(shape, buffers, hardware) : prepare<Narrow>(shape, buffers, hardware);
}

}  // namespace surogate
