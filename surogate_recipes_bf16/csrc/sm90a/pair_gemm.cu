// PairGemm by CUTLASS. Tiles of 128 x 256 x 64, half of one for each of two groups of warps; pairs of blocks share the
// tiles of B. LoRA steps of Qwen3-8B and 0.6B on an H200 against two products by cuBLASLt, alternating in one process
// (2026-11-22): 0.961 and 0.991 of the time. 256 x 128: 0.971 and 0.997. 128 x 128, by groups that take turns: 1.000
// and 1.001, although it is 2 to 17 % faster than the others in a loop of one product, where the clock is lower.
#include <cuda_runtime.h>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include <string>
#include <type_traits>

#include "pair_gemm.h"
#include "paired_mainloop.h"
#include "surogate/check.h"

namespace surogate {
namespace {

using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
constexpr int alignment = 8;  // elements in 16 bytes

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
    float, float, void, RowMajor, alignment, Element, RowMajor, alignment,
    cutlass::epilogue::TmaWarpSpecializedCooperative>::CollectiveOp;

template <class LayoutB>
using Mainloop = PairedMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, RowMajor, alignment, Element, LayoutB, alignment, float,
    Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp>;

void check_status(cutlass::Status status, const char* what) {
    if (status != cutlass::Status::kSuccess) {
        throw std::runtime_error(std::string("pair_gemm: ") + what + ": " + cutlass::cutlassGetStatusString(status));
    }
}

template <class LayoutB>
struct Prepared : PairGemm::Impl {
    using Loop = Mainloop<LayoutB>;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Loop, Epilogue,
                                                        cutlass::gemm::PersistentScheduler>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    Prepared(const PairShape& shape, const PairBuffers& buffers) {
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
        cutlass::KernelHardwareInfo hardware;
        check_cuda(cudaGetDevice(&hardware.device_id), "pair_gemm");
        check_cuda(cudaDeviceGetAttribute(&hardware.sm_count, cudaDevAttrMultiProcessorCount, hardware.device_id),
                   "pair_gemm");
        const typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                                 {m, n, tiles * Loop::tile_k, 1},
                                                 loop,
                                                 {{1.0f, 0.0f}, nullptr, stride, static_cast<Element*>(buffers.d), stride},
                                                 hardware};
        SUROGATE_REQUIRE(Gemm::get_workspace_size(arguments) == 0, "pair_gemm", "unexpected workspace");
        check_status(gemm.initialize(arguments, nullptr), "initialize");
    }

    void run(cudaStream_t stream) const override { check_status(gemm.run(stream), "run"); }

    mutable Gemm gemm;
};

}  // namespace

std::unique_ptr<PairGemm::Impl> make_pair_gemm(const PairShape& shape, const PairBuffers& buffers) {
    if (shape.transposed) {
        return std::make_unique<Prepared<cutlass::layout::ColumnMajor>>(shape, buffers);
    }
    return std::make_unique<Prepared<RowMajor>>(shape, buffers);
}

}  // namespace surogate
