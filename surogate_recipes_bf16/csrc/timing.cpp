#include "timing.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "surogate/check.h"

namespace surogate {
namespace {

constexpr const char* op_name = "timing";
constexpr float failed = std::numeric_limits<float>::infinity();

constexpr int screening_rounds = 5;
constexpr float sample_ms = 0.5f;          // at most 20 launches
constexpr float screening_margin = 0.98f;  // the first is replaced by one that takes less than this share of its time

constexpr size_t finalists = 4;           // with the first
constexpr float finalist_share = 1.12f;  // of the fastest time of the screening
constexpr float heat_ms = 100.0f;
constexpr float settle_ms = 40.0f;
constexpr float window_ms = 40.0f;
constexpr float again_share = 1.04f;  // of the fastest time of the first round
constexpr float load_margin = 0.985f;

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

int repeats_in(float window, float ms) { return std::max(1, static_cast<int>(window / std::max(ms, 0.001f))); }

float median(std::vector<float> samples) {
    std::sort(samples.begin(), samples.end());
    return samples[samples.size() / 2];
}

size_t smallest(const std::vector<float>& values) {
    return static_cast<size_t>(std::min_element(values.begin(), values.end()) - values.begin());
}

// Returns the median time of each candidate. Every round measures all of them, so that a drift of the clock affects all
// equally.
std::vector<float> screen(size_t count, const Stopwatch& stopwatch) {
    std::vector<int> repeats(count);
    for (size_t i = 0; i < count; ++i) {
        stopwatch.measure(i, 2);  // loads the kernel
        repeats[i] = std::min(repeats_in(sample_ms, stopwatch.measure(i, 1)), 20);
    }
    std::vector<std::vector<float>> samples(count);
    for (int round = 0; round < screening_rounds; ++round) {
        for (size_t i = 0; i < count; ++i) {
            samples[i].push_back(stopwatch.measure(i, repeats[i]));
        }
    }
    std::vector<float> ms(count);
    std::transform(samples.begin(), samples.end(), ms.begin(), median);
    return ms;
}

// Returns the fastest candidates of the screening. The first of the list is the one to keep in case of doubt: the first
// of all candidates, if it is fast enough, else the fastest.
std::vector<size_t> select(const std::vector<float>& screened) {
    const float limit = finalist_share * *std::min_element(screened.begin(), screened.end());
    std::vector<size_t> order(screened.size() - 1);
    std::iota(order.begin(), order.end(), size_t{1});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return screened[a] < screened[b]; });
    order.resize(std::min(order.size(), finalists - 1));
    order.insert(order.begin(), 0);
    order.erase(std::remove_if(order.begin(), order.end(), [&](size_t i) { return screened[i] > limit; }), order.end());
    return order;
}

Timed time_under_load(const std::vector<size_t>& among, const std::vector<float>& screened, const Stopwatch& stopwatch) {
    const auto settled_ms = [&](size_t candidate) {
        stopwatch.measure(candidate, repeats_in(settle_ms, screened[candidate]));
        return stopwatch.measure(candidate, repeats_in(window_ms, screened[candidate]));
    };
    stopwatch.measure(among[0], repeats_in(heat_ms, screened[among[0]]));
    std::vector<float> ms;
    for (const size_t candidate : among) {
        ms.push_back(settled_ms(candidate));
    }
    const float limit = again_share * ms[smallest(ms)];
    for (size_t i = among.size(); i-- > 0;) {
        if (i == 0 || ms[i] <= limit) {
            ms[i] = (ms[i] + settled_ms(among[i])) / 2;
        }
    }
    const size_t best = smallest(ms);
    const size_t taken = ms[best] < load_margin * ms[0] ? best : 0;
    return {among[taken], ms[taken]};
}

}  // namespace

Timed fastest(size_t count, const Launch& launch, const std::function<void()>& before_load, cudaStream_t stream) {
    const Stopwatch stopwatch(launch, stream);
    const std::vector<float> screened = screen(count, stopwatch);
    const size_t best = smallest(screened);
    const std::vector<size_t> among = screened[best] < failed ? select(screened) : std::vector<size_t>{best};
    if (before_load == nullptr || among.size() == 1) {
        const size_t taken = screened[best] < screening_margin * screened[0] ? best : 0;
        return {taken, screened[taken]};
    }
    before_load();
    return time_under_load(among, screened, stopwatch);
}

}  // namespace surogate
