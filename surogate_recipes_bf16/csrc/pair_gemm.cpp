#include "pair_gemm.h"

#include <string>

#include "surogate/check.h"
#include "surogate/sm90.h"

namespace surogate {
namespace {

constexpr const char* op_name = "pair_gemm";

void check_multiple(int64_t value, const char* name) {
    SUROGATE_REQUIRE(value > 0 && value % 8 == 0, op_name,
                     std::string(name) + " must be a multiple of 8, got " + std::to_string(value));
    to_int(value, op_name, name);
}

}  // namespace

PairGemm::PairGemm(const PairShape& shape, const PairBuffers& buffers) {
    check_positive(shape.m, op_name, "m");
    to_int(shape.m, op_name, "m");
    check_multiple(shape.n, "n");
    check_multiple(shape.k, "k");
    check_multiple(shape.k2, "k2");
    check_pointer(buffers.a, op_name, "a", 16);
    check_pointer(buffers.b, op_name, "b", 16);
    check_pointer(buffers.a2, op_name, "a2", 16);
    check_pointer(buffers.b2, op_name, "b2", 16);
    check_pointer(buffers.d, op_name, "d", 16);
    require_sm90(op_name);
#ifdef SUROGATE_SM90A
    impl_ = make_pair_gemm(shape, buffers);
#else
    throw std::runtime_error("pair_gemm: this module was compiled without SM90a (CUDAARCHS)");
#endif
}

PairGemm::~PairGemm() = default;

void PairGemm::run(cudaStream_t stream) const { impl_->run(stream); }

}  // namespace surogate
