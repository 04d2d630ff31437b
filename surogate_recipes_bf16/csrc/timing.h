// Selects the fastest of several ways to compute the same, by timing, in two stages.
//
// 1. Screening: every candidate in samples of 0.5 ms, in 5 rounds. About 30 ms for 8 candidates. Samples are so short
//    that the GPU runs at a higher clock than in a training step.
// 2. Under load, if the fastest takes 30 us or more: the fastest candidates, and the first, in 5 rounds of windows of
//    15 ms on a GPU that has computed for 150 ms. It is then at its power limit, where candidates rank differently: on
//    an H200 the winner of a screening took up to 7 % longer under load than the best (2026-11-22). About 0.5 s.
//
// The power controller changes the clock by 3 % within a second, so what is compared is the share of each candidate in
// the time of a round, and its median over the rounds.
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
// `before_load` may be null; it is called before the second stage. Synchronizes the stream.
Timed fastest(size_t count, const Launch& launch, const std::function<void()>& before_load, cudaStream_t stream);

}  // namespace surogate
