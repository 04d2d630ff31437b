// What products of groups of rows by CUTLASS share. A kernel of the package writes the groups; CUTLASS reads them on the device.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/group_array_problem_shape.hpp>

#include "surogate/cutlass.h"
#include "surogate/groups.h"

namespace surogate {

using GroupProblem = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;

// Places an array with an element for each group and moves `at` past it.
template <class T>
void place(T*& array, char*& at, int64_t groups) {
    array = reinterpret_cast<T*>(at);
    at += aligned(groups * static_cast<int64_t>(sizeof(T)));
}

// Shapes, pointers and strides of the groups of a kernel, and of others with the same operands.
template <class Kernel>
struct CutlassGroups {
    using A = typename Kernel::ElementA;
    using B = typename Kernel::ElementB;
    using D = typename Kernel::ElementD;
    using StrideA = typename Kernel::InternalStrideA;
    using StrideB = typename Kernel::InternalStrideB;
    using StrideD = typename Kernel::InternalStrideD;

    GroupProblem::UnderlyingProblemShape* shapes;
    const A** a;
    const B** b;
    D** d;
    StrideA* stride_a;
    StrideB* stride_b;
    StrideD* stride_d;

    // Places the arrays one after another and moves `at` past them.
    CutlassGroups(char*& at, int64_t groups) {
        place(shapes, at, groups);
        place(a, at, groups);
        place(b, at, groups);
        place(d, at, groups);
        place(stride_a, at, groups);
        place(stride_b, at, groups);
        place(stride_d, at, groups);
    }
};

// The arguments of a product of `count` groups. Sums are added to nothing; the factor is for the caller to set.
template <class Gemm, class Groups>
typename Gemm::Arguments group_arguments(const Groups& groups, int64_t count, const char* op) {
    cutlass::KernelHardwareInfo hardware;
    check_cuda(cudaGetDevice(&hardware.device_id), op);
    check_cuda(cudaDeviceGetAttribute(&hardware.sm_count, cudaDevAttrMultiProcessorCount, hardware.device_id), op);
    return {cutlass::gemm::GemmUniversalMode::kGrouped,
            {static_cast<int>(count), groups.shapes, nullptr},
            {groups.a, groups.stride_a, groups.b, groups.stride_b},
            {{}, nullptr, groups.stride_d, groups.d, groups.stride_d},
            hardware,
            {}};
}

// Prepares a product whose descriptors are from `at` to `end`.
template <class Gemm>
void initialize(Gemm& gemm, const typename Gemm::Arguments& arguments, char* at, const char* end, const char* op) {
    SUROGATE_REQUIRE(static_cast<int64_t>(Gemm::get_workspace_size(arguments)) <= end - at, op, "the workspace is too small");
    check_status(Gemm::can_implement(arguments), op, "can_implement");
    check_status(gemm.initialize(arguments, at), op, "initialize");
}

}  // namespace surogate
