// Kernels with planted errors, for sanitize.sh. If the sanitizer does not report them, its kernel filter is wrong.
//
//   planted memcheck     writes one element beyond its buffer
//   planted racecheck    reads shared memory written by another warp without a barrier
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

namespace surogate {
namespace {

constexpr int threads = 256;

__global__ void out_of_bounds_kernel(int* out) { out[threadIdx.x + 1] = 1; }

__global__ void race_kernel(int* out) {
    __shared__ int values[threads];
    values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = values[threads - 1 - threadIdx.x];
}

}  // namespace
}  // namespace surogate

int main(int, char** arguments) {
    int* out = nullptr;
    cudaMalloc(&out, surogate::threads * sizeof(int));
    if (std::strcmp(arguments[1], "memcheck") == 0) {
        surogate::out_of_bounds_kernel<<<1, surogate::threads>>>(out);
    } else {
        surogate::race_kernel<<<1, surogate::threads>>>(out);
    }
    std::printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    return 0;
}
