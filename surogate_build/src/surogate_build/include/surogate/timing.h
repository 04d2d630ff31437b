// Selects the fastest of several ways to compute the same, by timing: every candidate in samples of 0.5 ms, in 5 rounds,
// so that a drift of the GPU's clock affects all equally. About 30 ms for 8 candidates.
//
// The clock is higher than in a step of a large model, which runs at the power limit, and candidates rank differently
// there. Selecting under load, after 40 ms of settling, was tried and dropped: steps of Qwen2.5-0.5B on an H200 took
// 1.002 times as long (2026-11-22, dev/LOG.md).
//
// A shared source: `surogate_add_kernels(my_package USES cublaslt)`. Measurements of several threads or modules would
// disturb each other; `selecting` in surogate_core/api/cublaslt.py admits one at a time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace surogate {

struct Timed {
    size_t index;      // of the selected candidate
    float ms;          // its time; infinity: every candidate failed
    float slowest_ms;  // the longest time of a candidate that did not fail
};

// Enqueues candidate `i`, or returns false if that fails.
using Launch = std::function<bool(size_t i)>;

// Returns the fastest of `count` candidates. The first is preferred, unless another is faster by more than the noise.
// Synchronizes the stream.
Timed fastest(size_t count, const Launch& launch, cudaStream_t stream);

}  // namespace surogate
