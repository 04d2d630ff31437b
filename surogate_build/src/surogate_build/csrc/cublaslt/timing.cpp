#include "surogate/timing.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "surogate/check.h"

namespace surogate {
namespace {

constexpr const char* op_name = "timing";
constexpr float failed = std::numeric_limits<float>::infinity();

constexpr int rounds = 5;
constexpr float sample_ms = 0.5f;  // at most 20 launches
constexpr float margin = 0.98f;    // the first is replaced by one that takes less than this share of its time

class Event {
public:
    Event() { check_cuda(cudaEventCreate(&event_), op_name); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t get() const { return event_; }

private:
    cudaEvent_t event_ = nullptr;
};

class Stopwatch {
public:
    Stopwatch(const Launch& launch, cudaStream_t stream) : launch_(launch), stream_(stream) {}

    // Returns the mean time of `repeats` launches of a candidate in milliseconds, or `failed`.
    float measure(size_t candidate, int repeats) const {
        check_cuda(cudaEventRecord(start_.get(), stream_), op_name);
        for (int i = 0; i < repeats; ++i) {
            if (!launch_(candidate)) {
                check_cuda(cudaStreamSynchronize(stream_), op_name);
                return failed;
            }
        }
        check_cuda(cudaEventRecord(end_.get(), stream_), op_name);
        check_cuda(cudaEventSynchronize(end_.get()), op_name);
        float ms = 0;
        check_cuda(cudaEventElapsedTime(&ms, start_.get(), end_.get()), op_name);
        return ms / static_cast<float>(repeats);
    }

private:
    const Launch& launch_;
    cudaStream_t stream_;
    Event start_, end_;
};

float median(std::vector<float> samples) {
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
}

// Returns the median time of each candidate. Every round measures all of them.
std::vector<float> measure_all(size_t count, const Stopwatch& stopwatch) {
    std::vector<int> repeats(count);
    for (size_t i = 0; i < count; ++i) {
        stopwatch.measure(i, 2);  // loads the kernel
        const float ms = stopwatch.measure(i, 1);
        repeats[i] = std::clamp(static_cast<int>(sample_ms / std::max(ms, 0.001f)), 1, 20);
    }
    std::vector<std::vector<float>> samples(count);
    for (int round = 0; round < rounds; ++round) {
        for (size_t i = 0; i < count; ++i) {
            samples[i].push_back(stopwatch.measure(i, repeats[i]));
        }
    }
    std::vector<float> ms(count);
    std::transform(samples.begin(), samples.end(), ms.begin(), median);
    return ms;
}

}  // namespace

Timed fastest(size_t count, const Launch& launch, cudaStream_t stream) {
    const std::vector<float> ms = measure_all(count, Stopwatch(launch, stream));
    const size_t best = static_cast<size_t>(std::min_element(ms.begin(), ms.end()) - ms.begin());
    const size_t taken = ms[best] < margin * ms[0] ? best : 0;
    float slowest = 0;
    for (const float time : ms) {
        slowest = time == failed ? slowest : std::max(slowest, time);
    }
    return {taken, ms[taken], slowest};
}

}  // namespace surogate
