// What kernels with a warp for each token's logits share: the most experts that its lanes have, and checks.
#pragma once

#include <cstdint>
#include <string>

#include "surogate/check.h"
#include "surogate/dtype.h"

namespace surogate {

constexpr int most_experts = 256;
constexpr int most_chosen = 16;
constexpr int each = most_experts / 32;  // experts of a lane
constexpr int warps = 8;

inline void check_routes(const char* op, int64_t tokens, int64_t n_experts, int64_t k, int dtype) {
    check_positive(tokens, op, "tokens");
    SUROGATE_REQUIRE(n_experts > 0 && n_experts <= most_experts, op,
                     "experts must be 1 to 256, got " + std::to_string(n_experts));
    SUROGATE_REQUIRE(k > 0 && k <= most_chosen && k <= n_experts, op,
                     "k must be 1 to 16 and at most the number of experts, got " + std::to_string(k));
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, std::string("logits must be fp32 or bf16, not ") + name_of(dtype));
}

}  // namespace surogate
