// A kernel with a planted error, for sanitize.sh: a sanitizer that does not report it watches the wrong kernels.
//
//   planted memcheck     writes one element behind its buffer
//   planted racecheck    reads what another warp has written to shared memory, without a barrier between
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
