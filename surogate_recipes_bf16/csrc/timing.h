// Selects the fastest of several ways to compute the same, by timing, in two stages.
//
// 1. Screening: every candidate in samples of 0.5 ms, in 5 rounds. About 30 ms for 8 candidates. The GPU runs at a
//    higher clock than in a training step, which a large model holds at the power limit.
// 2. Under load, for what decides the time of a step: the first candidate and the fastest others run one after another
//    on a GPU that has computed for 100 ms. Each runs for 40 ms, until the clock has settled to the power that it takes,
//    and is timed for 40 more. Those near the best run once more, in reverse order. About 0.6 s.
//
// Time at the power limit is energy, so the rankings differ. H200, five products of 8B, 7B and 0.5B models, loss
// against the candidate that was fastest in windows of 90 ms after 60 ms (2026-11-22): selected by a screening 0 to
// 4.9 %, mean 2.0; by rounds of 12 ms windows, in which all candidates run at the same clock, 0 to 7.4 %, mean 3.9; by
// windows of 25 ms after 25 ms 0 to 2.0 %, mean 0.9. The controller moves the clock by 1 % from window to window.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace surogate {

struct Timed {
    size_t index;  // of the selected candidate
    float ms;      // its time; infinity: every candidate failed
};

// Enqueues candidate `i`, or returns false if that fails.
using Launch = std::function<bool(size_t i)>;

// Returns the fastest of `count` candidates. The first is preferred, unless another is faster by more than the noise.
// `before_load` is called before the second stage, which is left out if it is null. Synchronizes the stream.
Timed fastest(size_t count, const Launch& launch, const std::function<void()>& before_load, cudaStream_t stream);

}  // namespace surogate
