// y[i] = x[i]                             copy:   n_bytes of any dtype
// y[i] = x[i] if clip_coef is finite      commit: else nothing is written, since the step is skipped
//
// clip_coef: fp32 scalar in device memory, or null for an unconditional copy. x and y do not overlap.
//
// A thread moves 16 bytes if both pointers are aligned to 16 bytes, the threads behind the last whole 16 bytes one of
// the remaining bytes each; else every thread moves one byte. Buffers of the planner are aligned to 256 bytes. Bytes: x
// and y once; 85 to 90 % of the bandwidth expected above some MiB.
#include <surogate/dispatch.cuh>

#include "elementwise.h"

namespace surogate {
namespace {

constexpr int kThreads = 256;

template <class Word>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const unsigned char* x, unsigned char* y, int64_t n_bytes, const float* clip_coef) {
    if (clip_coef != nullptr && !isfinite(*clip_coef)) {
        return;
    }
    constexpr int64_t size = sizeof(Word);
    const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t words = n_bytes / size;
    if (index < words) {
        reinterpret_cast<Word*>(y)[index] = reinterpret_cast<const Word*>(x)[index];
    } else if (words * size + (index - words) < n_bytes) {
        y[words * size + (index - words)] = x[words * size + (index - words)];
    }
}

template <class Word>
void launch(const void* x, void* y, int64_t n_bytes, const float* clip_coef, const char* op, cudaStream_t stream) {
    constexpr int64_t size = sizeof(Word);
    const int64_t threads = n_bytes / size + n_bytes % size;
    const auto blocks = static_cast<unsigned>(to_int(ceil_div(threads, kThreads), op, "n_bytes / threads"));
    copy_kernel<Word><<<blocks, kThreads, 0, stream>>>(static_cast<const unsigned char*>(x),
                                                       static_cast<unsigned char*>(y), n_bytes, clip_coef);
}

void copy_if(const void* x, void* y, int64_t n_bytes, const float* clip_coef, const char* op, cudaStream_t stream) {
    check_positive(n_bytes, op, "n_bytes");
    check_pointer(x, op, "x", 1);
    check_pointer(y, op, "y", 1);
    all_aligned({x, y}) ? launch<uint4>(x, y, n_bytes, clip_coef, op, stream)
                        : launch<unsigned char>(x, y, n_bytes, clip_coef, op, stream);
    check_launch(op);
}

}  // namespace

void copy(const void* x, void* y, int64_t n_bytes, cudaStream_t stream) {
    copy_if(x, y, n_bytes, nullptr, "copy", stream);
}

void commit(const void* clip_coef, const void* x, void* y, int64_t n_bytes, cudaStream_t stream) {
    check_pointer(clip_coef, "commit", "clip_coef", 4);
    copy_if(x, y, n_bytes, static_cast<const float*>(clip_coef), "commit", stream);
}

}  // namespace surogate
