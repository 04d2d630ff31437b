#include "grouped_fp8.h"

#include <stdexcept>
#include <string>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/sm90.h"

namespace surogate {
namespace {

constexpr const char* op_name = "grouped_fp8";

void check_multiple(int64_t size, int64_t multiple, const std::string& name) {
    SUROGATE_REQUIRE(size > 0 && size % multiple == 0, op_name,
                     name + " must be a multiple of " + std::to_string(multiple) + ", got " + std::to_string(size));
    to_int(size, op_name, name.c_str());
}

void check(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers) {
    check_positive(shape.rows, op_name, "rows");
    to_int(shape.rows, op_name, "rows");
    check_multiple(shape.width, 8, "width");
    check_multiple(shape.terms, 16, "terms");
    SUROGATE_REQUIRE(shape.groups > 0 && shape.groups <= 65535, op_name,
                     "groups must be 1 to 65535, got " + std::to_string(shape.groups));
    SUROGATE_REQUIRE(shape.begin >= 0 && shape.begin <= 65535, op_name,
                     "the first group must be 0 to 65535, got " + std::to_string(shape.begin));
    SUROGATE_REQUIRE(shape.dtype_a == E4M3 || shape.dtype_a == E5M2, op_name,
                     std::string("a must be e4m3 or e5m2, not ") + name_of(shape.dtype_a));
    SUROGATE_REQUIRE(shape.dtype_b == E4M3 || shape.dtype_b == E5M2, op_name,
                     std::string("b must be e4m3 or e5m2, not ") + name_of(shape.dtype_b));
    check_pointer(buffers.a, op_name, "a", 16);
    check_pointer(buffers.b, op_name, "b", 16);
    check_pointer(buffers.scale_a, op_name, "scale_a", 4);
    check_pointer(buffers.scale_b, op_name, "scale_b", 4);
    check_pointer(buffers.ends, op_name, "ends", 4);
    check_pointer(buffers.d, op_name, "d", 16);
    SUROGATE_REQUIRE(shape.terms2 >= 0, op_name, "terms2 must not be negative, got " + std::to_string(shape.terms2));
    if (shape.terms2 > 0) {
        check_multiple(shape.terms2, 8, "terms2");
        SUROGATE_REQUIRE(shape.beside == (shape.dtype_a == E5M2), op_name,
                         "matrices that others are added to are beside each other where a is e5m2, else one above another");
        check_pointer(buffers.a2, op_name, "a2", 16);
        check_pointer(buffers.b2, op_name, "b2", 16);
    }
    if (buffers.bias != nullptr) {
        SUROGATE_REQUIRE(shape.dtype_a == E4M3 && shape.terms2 == 0, op_name,
                         "a bias is added to a product of a in e4m3 that adds no other");
        check_pointer(buffers.bias, op_name, "bias", 16);
    }
    check_pointer(buffers.workspace, op_name, "workspace", workspace_alignment);
}

}  // namespace

GroupedFp8::GroupedFp8(const GroupedFp8Shape& shape, const GroupedFp8Buffers& buffers) {
    check(shape, buffers);
    require_sm90(op_name);
#ifdef SUROGATE_SM90A
    impl_ = make_grouped_fp8(shape, buffers);
#else
    throw std::runtime_error("grouped_fp8: this module was compiled without SM90a (CUDAARCHS)");
#endif
}

GroupedFp8::~GroupedFp8() = default;

void GroupedFp8::run(cudaStream_t stream) const { impl_->run(stream); }

}  // namespace surogate
