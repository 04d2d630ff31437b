#include "grouped_gemm.h"

#include <string>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/sm90.h"

namespace surogate {
namespace {

constexpr const char* op_name = "grouped_gemm";

}  // namespace

void check_grouped(const GroupedShape& shape, const void* a, const void* b, const void* ends, const void* d) {
    check_positive(shape.rows, op_name, "rows");
    to_int(shape.rows, op_name, "rows");
    for (const int64_t width : {shape.n, shape.k}) {
        SUROGATE_REQUIRE(width > 0 && width % 8 == 0, op_name,
                         "n and k must be multiples of 8, got " + std::to_string(width));
        to_int(width, op_name, "n and k");
    }
    SUROGATE_REQUIRE(shape.experts > 0 && shape.experts <= 65535, op_name,
                     "experts must be 1 to 65535, got " + std::to_string(shape.experts));
    SUROGATE_REQUIRE(shape.kind >= FORWARD && shape.kind <= WGRAD, op_name, "unknown kind");
    SUROGATE_REQUIRE(shape.dtype_d == BF16 || (shape.dtype_d == FP32 && shape.kind == WGRAD), op_name,
                     std::string("results are bf16, or fp32 of wgrad, not ") + name_of(shape.dtype_d));
    SUROGATE_REQUIRE(!shape.accumulate || shape.dtype_d == FP32, op_name, "only fp32 accumulates");
    SUROGATE_REQUIRE(shape.begin >= 0 && (shape.of == 0 ? shape.begin == 0 : shape.kind != WGRAD), op_name,
                     "only forward and dgrad are of some experts");
    SUROGATE_REQUIRE(shape.of == 0 || (shape.begin + shape.experts <= shape.of && shape.of <= 65535), op_name,
                     "there are no " + std::to_string(shape.experts) + " experts from " + std::to_string(shape.begin) + " on of " +
                         std::to_string(shape.of));
    check_pointer(a, op_name, "a", 16);
    check_pointer(b, op_name, "b", 16);
    check_pointer(ends, op_name, "ends", 4);
    check_pointer(d, op_name, "d", 16);
}

GroupedGemm::GroupedGemm(const GroupedShape& shape, const GroupedBuffers& buffers) {
    check_grouped(shape, buffers.a, buffers.b, buffers.ends, buffers.d);
    SUROGATE_REQUIRE(shape.terms2 >= 0 && shape.terms2 % 8 == 0 && (shape.terms2 == 0 || shape.kind != WGRAD), op_name,
                     "terms2 must be a multiple of 8, and 0 in wgrad, got " + std::to_string(shape.terms2));
    if (shape.terms2 > 0) {
        to_int(shape.terms2, op_name, "terms2");
        check_pointer(buffers.a2, op_name, "a2", 16);
        check_pointer(buffers.b2, op_name, "b2", 16);
    }
    if (buffers.bias != nullptr) {
        SUROGATE_REQUIRE(shape.kind == FORWARD && shape.terms2 == 0, op_name, "only a forward product of one pair adds a bias");
        check_pointer(buffers.bias, op_name, "bias", 16);
    }
    check_pointer(buffers.workspace, op_name, "workspace", workspace_alignment);
    require_sm90(op_name);
#ifdef SUROGATE_SM90A
    impl_ = make_grouped_gemm(shape, buffers);
#else
    throw std::runtime_error("grouped_gemm: this module was compiled without SM90a (CUDAARCHS)");
#endif
}

GroupedGemm::~GroupedGemm() = default;

void GroupedGemm::run(cudaStream_t stream) const { impl_->run(stream); }

}  // namespace surogate
