#include "gemm_choices.h"

#include <algorithm>
#include <cstdio>

#include "surogate/check.h"
#include "surogate/gemm.h"

namespace surogate {
namespace {

std::string to_hex(const cublasLtMatmulAlgo_t& algo) {
    std::string hex;
    for (const uint64_t word : algo.data) {
        char digits[17];
        std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(word));
        hex += digits;
    }
    return hex;
}

cublasLtMatmulAlgo_t from_hex(const std::string& hex) {
    cublasLtMatmulAlgo_t algo{};
    constexpr size_t words = sizeof(algo.data) / sizeof(algo.data[0]);
    const bool digits = hex.find_first_not_of("0123456789abcdef") == std::string::npos;
    SUROGATE_REQUIRE(digits && hex.size() == 16 * words, "gemm_import", "not an algorithm: '" + hex + "'");
    for (size_t i = 0; i < words; ++i) {
        algo.data[i] = std::stoull(hex.substr(16 * i, 16), nullptr, 16);
    }
    return algo;
}

bool is_exported(const Choice& choice) { return choice.is_timed() || choice.is_imported(); }

}  // namespace

Choices& choices() {
    static Choices all;
    return all;
}

std::vector<std::pair<std::string, std::string>> exported_choices() {
    Choices& all = choices();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::vector<std::pair<std::string, std::string>> list;
    for (const auto& [description, choice] : all.by_description) {
        if (is_exported(choice)) {
            list.emplace_back(description, to_hex(choice.algo));
        }
    }
    return list;
}

size_t count_choices() {
    Choices& all = choices();
    const std::lock_guard<std::mutex> lock(all.mutex);
    return static_cast<size_t>(std::count_if(all.by_description.begin(), all.by_description.end(),
                                             [](const auto& entry) { return is_exported(entry.second); }));
}

void import_choices(const std::vector<std::pair<std::string, std::string>>& list) {
    Choices& all = choices();
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& [description, algorithm] : list) {
        all.by_description[description] = {from_hex(algorithm), 0, 0, 0};
    }
}

}  // namespace surogate
