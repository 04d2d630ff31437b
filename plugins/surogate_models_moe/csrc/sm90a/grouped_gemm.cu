// The kernels of GroupedGemm by CUTLASS: tiles of 128 x 256 x 64, half of one for each of two groups of warps.
//
// The groups are what a small kernel writes from `ends`: shape, pointers and strides of each expert. An expert without rows
// has no tiles. In wgrad its gradient is then filled with zeros by a third kernel, unless it accumulates.
//
// What blocks read of the L2 cache limits the rate. For 64 terms of a tile a block reads 40 KB where it shares A with the one
// beside it, and 32 KB where it shares B with the one below. But then tiles of rows come in pairs, and 128 rows are lost to
// each expert on average instead of 64. Tiles of 128 x 128 with turns between the groups of warps read 48 KB for as many
// products: 447 to 542 TFLOP/s on an H100 with 1,024 rows an expert (2026-11-25), where torch's grouped_mm, with tiles of
// 128 x 256, reached 559 to 644.
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

#include "grouped_gemm.h"
#include "groups.cuh"
#include "surogate/check.h"
#include "surogate/cutlass_groups.cuh"
#include "surogate/dtype.h"
#include "surogate/paired_groups.cuh"

namespace surogate {
namespace {

constexpr const char* op_name = "grouped_gemm";
using Element = cutlass::bfloat16_t;
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
constexpr int alignment = 8;  // elements in 16 bytes

struct Forward {
    using LayoutA = RowMajor;
    using LayoutB = ColumnMajor;
    using C = void;
    using D = Element;
};

// Adds the bias of the group, a row, in fp32, and rounds once.
struct Biased : Forward {};

struct Dgrad {
    using LayoutA = RowMajor;
    using LayoutB = RowMajor;
    using C = void;
    using D = Element;
};

template <class Gradient>
struct Wgrad {
    using LayoutA = ColumnMajor;
    using LayoutB = RowMajor;
    using C = std::conditional_t<std::is_same_v<Gradient, float>, float, void>;  // only fp32 accumulates
    using D = Gradient;
};

// Pairs of blocks: the tiles of one below the other share the tiles of B, those beside each other the tiles of A.
using Below = cute::Shape<cute::_2, cute::_1, cute::_1>;
using Beside = cute::Shape<cute::_1, cute::_2, cute::_1>;

template <class Kind>
constexpr bool is_wgrad = std::is_same_v<typename Kind::LayoutA, ColumnMajor>;

template <class Kind>
constexpr bool is_forward = std::is_base_of_v<Forward, Kind>;

template <class Kind>
constexpr bool is_biased = std::is_same_v<Kind, Biased>;

template <class Kind>
constexpr int alignment_d = 16 / sizeof(typename Kind::D);

// From an array of pointers, one of each group.
using BiasOfGroup = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, Element*, float>;

constexpr auto round_to_nearest = cutlass::FloatRoundStyle::round_to_nearest;
using SumWithBias = cutlass::epilogue::fusion::Sm90EVT<
    cutlass::epilogue::fusion::Sm90Compute<cutlass::plus, Element, float, round_to_nearest>, BiasOfGroup,
    cutlass::epilogue::fusion::Sm90AccFetch>;

// What the epilogue computes of the sums.
template <class Kind>
using Computed = std::conditional_t<
    is_biased<Kind>, SumWithBias,
    cutlass::epilogue::fusion::LinearCombination<typename Kind::D, float, typename Kind::C, float, round_to_nearest>>;

template <class Kind, class Pair>
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Pair, cutlass::epilogue::collective::EpilogueTileAuto, float,
    float, typename Kind::C, RowMajor*, alignment_d<Kind>, typename Kind::D, RowMajor*, alignment_d<Kind>,
    cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative, Computed<Kind>>::CollectiveOp;

template <class Kind, class Pair>
using Product = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, typename Kind::LayoutA*, alignment, Element,
    typename Kind::LayoutB*, alignment, float, Tile, Pair,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue<Kind, Pair>::SharedStorage))>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;

template <class Kind, class Pair>
using Mainloop = std::conditional_t<is_wgrad<Kind>, Product<Kind, Pair>, PairedGroups<Product<Kind, Pair>>>;

template <class Kind, class Pair>
using Kernel = cutlass::gemm::kernel::GemmUniversal<GroupProblem, Mainloop<Kind, Pair>, Epilogue<Kind, Pair>>;

// Those of kernels with the other pairs are the same.
template <class Kind>
using Groups = CutlassGroups<Kernel<Kind, Below>>;

template <class Kind>
using Others = SecondOperands<Product<Kind, Below>>;

// A thread per expert, of those from `begin` on. `terms2`: of the second pair, 0 without one. A bias, of a product without one,
// is held in its place. Bytes: about 60 an expert, 90 with a second pair.
template <class Kind>
__global__ void groups_kernel(Groups<Kind> groups, Others<Kind> others, const Element* a, const Element* b, const Element* a2,
                              const Element* b2, const Element* bias, typename Kind::D* d, const int32_t* ends, int n, int k,
                              int terms2, int begin, int experts) {
    using cute::make_shape;
    using cutlass::make_cute_packed_stride;
    const int e = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (e >= experts) {
        return;
    }
    const int first = start_of(ends, begin + e), rows = ends[begin + e] - first;
    const int64_t start = first, matrix = static_cast<int64_t>(e) * n * k;
    int m_e, n_e, k_e;
    if constexpr (is_forward<Kind>) {
        m_e = rows, n_e = n, k_e = k;
        groups.a[e] = a + start * k, groups.b[e] = b + matrix, groups.d[e] = d + start * n;
    } else if constexpr (std::is_same_v<Kind, Dgrad>) {
        m_e = rows, n_e = k, k_e = n;
        groups.a[e] = a + start * n, groups.b[e] = b + matrix, groups.d[e] = d + start * k;
    } else {
        m_e = rows > 0 ? n : 0, n_e = k, k_e = rows;
        groups.a[e] = a + start * n, groups.b[e] = b + start * k, groups.d[e] = d + matrix;
    }
    // Strides are those of whole matrices: `rows` is no stride.
    const int m_s = is_wgrad<Kind> ? n : m_e;
    int padded = k_e;
    if constexpr (!is_wgrad<Kind>) {
        padded = Mainloop<Kind, Below>::padded_terms(k_e, terms2);
        if constexpr (is_biased<Kind>) {
            others.b[e] = bias + static_cast<int64_t>(begin + e) * n;
        }
        if (terms2 > 0) {
            others.a[e] = a2 + start * terms2;
            others.b[e] = b2 + static_cast<int64_t>(e) * n_e * terms2;
            others.stride_a[e] = make_cute_packed_stride(typename Groups<Kind>::StrideA{}, make_shape(m_e, terms2, 1));
            others.stride_b[e] = make_cute_packed_stride(typename Groups<Kind>::StrideB{}, make_shape(n_e, terms2, 1));
        }
    }
    groups.shapes[e] = make_shape(m_e, n_e, padded);
    groups.stride_a[e] = make_cute_packed_stride(typename Groups<Kind>::StrideA{}, make_shape(m_s, k_e, 1));
    groups.stride_b[e] = make_cute_packed_stride(typename Groups<Kind>::StrideB{}, make_shape(n_e, k_e, 1));
    groups.stride_d[e] = make_cute_packed_stride(typename Groups<Kind>::StrideD{}, make_shape(m_s, n_e, 1));
}

// Zeros for the gradients of experts without rows. Grid: (blocks of a matrix, experts). Bytes: those of their gradients.
__global__ void zeros_kernel(float4* d, const int32_t* ends, int64_t words) {
    const int e = static_cast<int>(blockIdx.y);
    if (ends[e] != (e == 0 ? 0 : ends[e - 1])) {
        return;
    }
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
        d[e * words + i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

template <class Kind, class Pair>
struct Prepared : GroupedGemm::Impl {
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel<Kind, Pair>>;

    Prepared(const GroupedShape& shape, const GroupedBuffers& buffers)
        : shape(shape),
          buffers(buffers),
          at(static_cast<char*>(buffers.workspace)),
          groups(at, shape.experts),
          others(at, shape.experts) {
        auto arguments = group_arguments<Gemm>(groups, shape.experts, op_name);
        if constexpr (is_biased<Kind>) {
            arguments.epilogue.thread = {{others.b, Element(0), {}}, {}, {}};
        } else {
            arguments.epilogue.thread.alpha = 1.0f;
            arguments.epilogue.thread.beta = shape.accumulate ? 1.0f : 0.0f;
        }
        if constexpr (!std::is_void_v<typename Kind::C>) {
            arguments.epilogue.ptr_C = const_cast<const float**>(groups.d);
        }
        if constexpr (!is_wgrad<Kind>) {
            auto& loop = arguments.mainloop;
            loop.second = loop.first;
            if (shape.terms2 > 0) {
                loop.second = {others.a, others.stride_a, others.b, others.stride_b};
            }
            loop.first_terms = static_cast<int>(shape.kind == FORWARD ? shape.k : shape.n);
            loop.second_terms = static_cast<int>(shape.terms2);
            loop.processors = arguments.hw_info.sm_count;
        }
        initialize(gemm, arguments, at, static_cast<char*>(buffers.workspace) + groups_bytes(shape.experts), op_name);
    }

    void run(cudaStream_t stream) const override {
        const int experts = static_cast<int>(shape.experts), n = static_cast<int>(shape.n), k = static_cast<int>(shape.k);
        auto* d = static_cast<typename Kind::D*>(buffers.d);
        groups_kernel<Kind><<<(experts + 127) / 128, 128, 0, stream>>>(
            groups, others, static_cast<const Element*>(buffers.a), static_cast<const Element*>(buffers.b),
            static_cast<const Element*>(buffers.a2), static_cast<const Element*>(buffers.b2),
            static_cast<const Element*>(buffers.bias), d, buffers.ends, n, k, static_cast<int>(shape.terms2),
            static_cast<int>(shape.begin), experts);
        check_launch(op_name);
        check_status(gemm.run(stream), op_name, "run");
        if constexpr (is_wgrad<Kind>) {
            if (!shape.accumulate) {
                zeros_kernel<<<dim3(8, experts), 256, 0, stream>>>(reinterpret_cast<float4*>(d), buffers.ends,
                                                                   shape.n * shape.k / alignment_d<Kind>);
                check_launch(op_name);
            }
        }
    }

    GroupedShape shape;
    GroupedBuffers buffers;
    char* at;
    Groups<Kind> groups;
    Others<Kind> others;
    mutable Gemm gemm;
};

constexpr int64_t pair_columns = 512;

// Whether the columns are whole pairs of tiles and experts have few rows.
bool is_beside(const GroupedShape& shape) {
    const int64_t columns = shape.kind == FORWARD ? shape.n : shape.k;
    return columns % pair_columns == 0 && shape.rows <= 512 * (shape.of > 0 ? shape.of : shape.experts);
}

}  // namespace

std::unique_ptr<GroupedGemm::Impl> make_grouped_gemm(const GroupedShape& shape, const GroupedBuffers& buffers) {
    const auto make = [&](auto kind, auto pair) -> std::unique_ptr<GroupedGemm::Impl> {
        return std::make_unique<Prepared<decltype(kind), decltype(pair)>>(shape, buffers);
    };
    switch (shape.kind) {
        case FORWARD:
            if (buffers.bias != nullptr) {
                return is_beside(shape) ? make(Biased{}, Beside{}) : make(Biased{}, Below{});
            }
            return is_beside(shape) ? make(Forward{}, Beside{}) : make(Forward{}, Below{});
        case DGRAD:
            return is_beside(shape) ? make(Dgrad{}, Beside{}) : make(Dgrad{}, Below{});
        default:
            return shape.dtype_d == FP32 ? make(Wgrad<float>{}, Below{}) : make(Wgrad<Element>{}, Below{});
    }
}

}  // namespace surogate
