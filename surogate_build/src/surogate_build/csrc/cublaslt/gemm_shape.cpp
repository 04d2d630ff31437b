#include "gemm_shape.h"

#include <algorithm>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/workspace.h"

namespace surogate {
namespace {

constexpr const char* op_name = "gemm";
constexpr int64_t narrow_alignment = 16;  // of pointers and rows in bytes, with operands of 8 or 4 bits
constexpr int64_t block_multiple = 32;    // of k, with scales of blocks

bool is_fp8(int dtype) { return dtype == E4M3 || dtype == E5M2; }

std::string operands(const GemmShape& s) {
    const std::string a = name_of(s.dtype_a), b = name_of(s.dtype_b);
    return a == b ? a : a + "*" + b;
}

void check_dtypes(const GemmShape& s) {
    const bool fp8 = is_fp8(s.dtype_a) && is_fp8(s.dtype_b) && (s.dtype_a == E4M3 || s.dtype_b == E4M3);
    const bool fp4 = s.dtype_a == E2M1 && s.dtype_b == E2M1;
    const bool plain = s.dtype_a == s.dtype_b && (s.dtype_a == BF16 || s.dtype_a == FP32);
    SUROGATE_REQUIRE(fp8 || fp4 || plain, op_name,
                     "operands must be both fp32, both bf16, both e2m1, or e4m3 and e4m3 or e5m2, got " + operands(s));
    SUROGATE_REQUIRE(s.dtype_d == FP32 || (s.dtype_d == BF16 && s.dtype_a != FP32), op_name,
                     "D cannot be " + std::string(name_of(s.dtype_d)) + " with operands in " + operands(s));
    SUROGATE_REQUIRE(!plain || s.scaling == GemmScaling::None, op_name, "operands in " + operands(s) + " have no scales");
    SUROGATE_REQUIRE(!fp8 || s.scaling == GemmScaling::Tensor || s.scaling == GemmScaling::Blocks32, op_name,
                     "FP8 operands need one scale each, or scales of blocks of 32");
    SUROGATE_REQUIRE(!fp4 || s.scaling == GemmScaling::Blocks16, op_name, "FP4 operands need scales of blocks of 16");
    SUROGATE_REQUIRE(!s.fast || s.scaling == GemmScaling::Tensor, op_name,
                     "fast accumulation needs FP8 operands with one scale each");
    SUROGATE_REQUIRE(!s.accumulate || !s.has_bias, op_name, "a product with a bias cannot accumulate");
    const int bias = plain ? s.dtype_d : BF16;
    SUROGATE_REQUIRE(!s.has_bias || s.dtype_bias == bias, op_name,
                     std::string("dtype_bias must be ") + name_of(bias) + ", got " + name_of(s.dtype_bias));
}

void check_narrow_matrix(int64_t ld, int dtype, int64_t alignment, const char* name) {
    SUROGATE_REQUIRE(ld * bits_of(dtype) % (8 * narrow_alignment) == 0, op_name,
                     std::string("rows of ") + name + " must be multiples of 16 bytes with FP8 and FP4 operands, got " +
                         std::to_string(ld) + " elements of " + name_of(dtype));
    SUROGATE_REQUIRE(alignment >= narrow_alignment, op_name,
                     std::string(name) + " must be aligned to 16 bytes with FP8 and FP4 operands, got " +
                         std::to_string(alignment));
}

void check_blocks(const GemmShape& s) {
    SUROGATE_REQUIRE(!s.trans_a && s.trans_b, op_name,
                     std::string("scales of blocks need A as [m,k] and B as [n,k], got A as ") +
                         (s.trans_a ? "[k,m]" : "[m,k]") + " and B as " + (s.trans_b ? "[n,k]" : "[k,n]"));
    SUROGATE_REQUIRE(s.k % block_multiple == 0, op_name,
                     "k must be a multiple of 32 with scales of blocks, got " + std::to_string(s.k));
}

}  // namespace

int64_t stored_a(const GemmShape& s) { return s.trans_a ? s.m : s.k; }
int64_t stored_b(const GemmShape& s) { return s.trans_b ? s.k : s.n; }
int64_t stored_rows_a(const GemmShape& s) { return s.trans_a ? s.k : s.m; }
int64_t stored_rows_b(const GemmShape& s) { return s.trans_b ? s.n : s.k; }

int64_t block_of(const GemmShape& s) {
    return s.scaling == GemmScaling::Blocks16 ? 16 : s.scaling == GemmScaling::Blocks32 ? 32 : 0;
}

int64_t scale_bytes(const GemmShape& s, int64_t rows) {
    return ceil_div(rows, 128) * ceil_div(s.k / block_of(s), 4) * 512;
}

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
    check_dtypes(s);
    if (block_of(s) > 0) {
        check_blocks(s);
    }
    SUROGATE_REQUIRE(s.batch >= 0, op_name, "batch must not be negative, got " + std::to_string(s.batch));
    to_int(s.batch, op_name, "batch");
    s.stride_a = s.stride_a == 0 ? stored_rows_a(s) * s.lda : s.stride_a;
    s.stride_b = s.stride_b == 0 ? stored_rows_b(s) * s.ldb : s.stride_b;
    s.stride_d = s.stride_d == 0 ? s.m * s.ldd : s.stride_d;
    SUROGATE_REQUIRE(s.stride_a > 0 && s.stride_b > 0 && s.stride_d > (s.m - 1) * s.ldd, op_name,
                     "strides must be positive, and results of a batch must not overlap");
    SUROGATE_REQUIRE(s.batch == 0 || (!s.has_bias && s.scaling == GemmScaling::None), op_name,
                     "a batch has no bias and no scales");
    SUROGATE_REQUIRE(s.library_bytes >= 0 && s.library_bytes % workspace_alignment == 0, op_name,
                     "library_bytes must be a multiple of 256");
    for (int64_t* alignment : {&s.alignment_a, &s.alignment_b, &s.alignment_d}) {
        SUROGATE_REQUIRE(*alignment > 0 && (*alignment & (*alignment - 1)) == 0, op_name,
                         "alignments must be powers of two");
        *alignment = std::min(*alignment, workspace_alignment);
    }
    if (s.scaling != GemmScaling::None) {
        check_narrow_matrix(s.lda, s.dtype_a, s.alignment_a, "A");
        check_narrow_matrix(s.ldb, s.dtype_b, s.alignment_b, "B");
        check_narrow_matrix(s.ldd, s.dtype_d, s.alignment_d, "D");
    }
    return s;
}

std::string describe_shape(const GemmShape& s) {
    const auto n = [](int64_t value) { return std::to_string(value); };
    std::string text = n(s.m) + "x" + n(s.n) + "x" + n(s.k) + (s.trans_a ? " t" : " n") + (s.trans_b ? "t " : "n ");
    text += operands(s) + "->" + name_of(s.dtype_d);
    text += (s.has_bias ? " bias" : "") + std::string(s.accumulate ? " accumulate" : "");
    text += s.batch > 0 ? " batched" : "";
    text += (s.scaling != GemmScaling::None ? " scaled" : "") + std::string(s.fast ? " fast" : "");
    text += block_of(s) > 0 ? " by " + n(block_of(s)) : "";
    text += s.device_factors ? " device factors" : "";
    if (s.lda != stored_a(s) || s.ldb != stored_b(s) || s.ldd != s.n) {
        text += " ld " + n(s.lda) + "," + n(s.ldb) + "," + n(s.ldd);
    }
    if (std::min({s.alignment_a, s.alignment_b, s.alignment_d}) < 256) {
        text += " aligned " + n(s.alignment_a) + "," + n(s.alignment_b) + "," + n(s.alignment_d);
    }
    return text + " workspace " + n(s.library_bytes);
}

}  // namespace surogate
