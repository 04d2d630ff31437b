#include "gemm_shape.h"

#include <algorithm>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "workspace.h"

namespace surogate {
namespace {

constexpr const char* op_name = "gemm";

}  // namespace

int64_t stored_a(const GemmShape& s) { return s.trans_a ? s.m : s.k; }
int64_t stored_b(const GemmShape& s) { return s.trans_b ? s.k : s.n; }
int64_t stored_rows_a(const GemmShape& s) { return s.trans_a ? s.k : s.m; }
int64_t stored_rows_b(const GemmShape& s) { return s.trans_b ? s.n : s.k; }

GemmShape checked(GemmShape s) {
    check_positive(s.m, op_name, "m");
    check_positive(s.n, op_name, "n");
    check_positive(s.k, op_name, "k");
    s.lda = s.lda == 0 ? stored_a(s) : s.lda;
    s.ldb = s.ldb == 0 ? stored_b(s) : s.ldb;
    s.ldd = s.ldd == 0 ? s.n : s.ldd;
    SUROGATE_REQUIRE(s.lda >= stored_a(s), op_name,
                     "lda must be at least " + std::to_string(stored_a(s)) + ", got " + std::to_string(s.lda));
    SUROGATE_REQUIRE(s.ldb >= stored_b(s), op_name,
                     "ldb must be at least " + std::to_string(stored_b(s)) + ", got " + std::to_string(s.ldb));
    SUROGATE_REQUIRE(s.ldd >= s.n, op_name,
                     "ldd must be at least " + std::to_string(s.n) + ", got " + std::to_string(s.ldd));
    const auto supported = [](int dtype) { return dtype == BF16 || dtype == FP32; };
    SUROGATE_REQUIRE(supported(s.dtype_ab), op_name,
                     std::string("dtype_ab must be fp32 or bf16, got ") + name_of(s.dtype_ab));
    SUROGATE_REQUIRE(supported(s.dtype_d), op_name,
                     std::string("dtype_d must be fp32 or bf16, got ") + name_of(s.dtype_d));
    SUROGATE_REQUIRE(!s.accumulate || s.dtype_ab == s.dtype_d || s.dtype_d == FP32, op_name,
                     "fp32 operands with a bf16 D cannot accumulate");
    SUROGATE_REQUIRE(!s.accumulate || !s.has_bias, op_name, "a product with a bias cannot accumulate");
    if (s.has_bias) {
        const int product = s.dtype_ab == FP32 ? FP32 : s.dtype_d;
        SUROGATE_REQUIRE(s.dtype_bias == product || (s.dtype_bias == BF16 && product == FP32), op_name,
                         std::string("dtype_bias cannot be ") + name_of(s.dtype_bias) + " with a product in " +
                             name_of(product));
    }
    SUROGATE_REQUIRE(s.library_bytes >= 0 && s.library_bytes % workspace_alignment == 0, op_name,
                     "library_bytes must be a multiple of 256");
    for (int64_t* alignment : {&s.alignment_a, &s.alignment_b, &s.alignment_d}) {
        SUROGATE_REQUIRE(*alignment > 0 && (*alignment & (*alignment - 1)) == 0, op_name,
                         "alignments must be powers of two");
        *alignment = std::min(*alignment, workspace_alignment);
    }
    return s;
}

bool is_staged(const GemmShape& s) { return s.dtype_ab == FP32 && s.dtype_d == BF16; }
int product_dtype(const GemmShape& s) { return is_staged(s) ? FP32 : s.dtype_d; }
bool is_bias_widened(const GemmShape& s) { return s.has_bias && s.dtype_bias != product_dtype(s); }
int64_t staged_bytes(const GemmShape& s) { return is_staged(s) ? aligned(s.m * s.n * 4) : 0; }
int64_t bias_bytes(const GemmShape& s) { return is_bias_widened(s) ? aligned(s.n * 4) : 0; }

std::string describe_shape(const GemmShape& s) {
    const auto n = [](int64_t value) { return std::to_string(value); };
    std::string text = n(s.m) + "x" + n(s.n) + "x" + n(s.k) + (s.trans_a ? " t" : " n") + (s.trans_b ? "t " : "n ");
    text += std::string(name_of(s.dtype_ab)) + "->" + name_of(product_dtype(s));
    text += (s.has_bias ? " bias" : "") + std::string(s.accumulate ? " accumulate" : "");
    if (s.lda != stored_a(s) || s.ldb != stored_b(s) || s.ldd != s.n) {
        text += " ld " + n(s.lda) + "," + n(s.ldb) + "," + n(s.ldd);
    }
    if (std::min({s.alignment_a, s.alignment_b, s.alignment_d}) < 256) {
        text += " aligned " + n(s.alignment_a) + "," + n(s.alignment_b) + "," + n(s.alignment_d);
    }
    return text + " workspace " + n(s.library_bytes);
}

}  // namespace surogate
