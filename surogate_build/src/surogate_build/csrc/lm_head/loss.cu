// sum_loss           loss (+)= loss_scale * sum_t row_loss[t]
// cluster_holds_row  whether launch_cross_entropy_in_cluster (cross_entropy_cluster.cuh) serves a vocabulary
//
// row_loss, loss_scale  fp32 [rows] and fp32 []
// loss                  fp32 [], written, or accumulated into (+=) with `accumulate`
//
// sum_loss is one block; each thread sums a fixed part in fp64, so results are bit-identical from run to run.

#include <cuda_runtime.h>

#include "surogate/check.h"
#include "surogate/lm_head.h"
#include "surogate/reduce.cuh"

namespace surogate {
namespace {

constexpr int sum_threads = 1024;

__global__ void __launch_bounds__(sum_threads)
    sum_loss_kernel(const float* __restrict__ row_loss, const float* __restrict__ loss_scale, float* __restrict__ loss,
                    int64_t rows, bool accumulate) {
    __shared__ double scratch[32];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < rows; i += sum_threads) {
        sum += row_loss[i];
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        const float scaled = static_cast<float>(sum * *loss_scale);
        *loss = accumulate ? *loss + scaled : scaled;
    }
}

}  // namespace

bool cluster_holds_row(int64_t vocab_size) {
    int device = 0, has_clusters = 0;
    check_cuda(cudaGetDevice(&device), "cross_entropy_grads");
    check_cuda(cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, device), "cross_entropy_grads");
    return has_clusters != 0 && vocab_size <= 8 * 8 * 512 * 8;
}

void sum_loss(const void* row_loss, const void* loss_scale, void* loss, int64_t rows, bool accumulate,
              cudaStream_t stream) {
    check_positive(rows, "sum_loss", "rows");
    check_pointer(row_loss, "sum_loss", "row_loss", 4);
    check_pointer(loss_scale, "sum_loss", "loss_scale", 4);
    check_pointer(loss, "sum_loss", "loss", 4);
    sum_loss_kernel<<<1, sum_threads, 0, stream>>>(static_cast<const float*>(row_loss),
                                                   static_cast<const float*>(loss_scale), static_cast<float*>(loss),
                                                   rows, accumulate);
    check_launch("sum_loss");
}

}  // namespace surogate
