// The algorithms that products of this process use, by description (`describe_shape`, `describe_platform`).
#pragma once

#include <cublasLt.h>

#include <map>
#include <mutex>
#include <string>

namespace surogate {

struct Choice {
    cublasLtMatmulAlgo_t algo{};
    float ms = 0;        // measured time; 0: not timed
    int candidates = 0;  // number of algorithms compared; 0: imported
    float slowest_ms = 0;

    bool is_timed() const { return ms > 0; }
    bool is_imported() const { return candidates == 0; }
};

// The mutex is held while a product is timed. If two threads need the same product, the second one reuses the algorithm
// of the first, and their measurements do not disturb each other.
struct Choices {
    std::mutex mutex;
    std::map<std::string, Choice> by_description;
};

Choices& choices();

}  // namespace surogate
