// Softmax and cross-entropy over rows of logits, with the gradient in place of the logits.
//
//   row_loss, and arguments         cross_entropy.cuh
//   logits <- gradient * loss_scale  with cross_entropy_grads, rounded once. cross_entropy only reads them.
//
// Bytes moved per logit of a labelled row in bf16: 4 (2 for the loss alone), plus up to 2 if the second read misses L2.
// Most reads miss: 4 blocks per SM have 160 MB of rows in flight at V = 152k, and L2 has 50 MB. Expected: 60-70 % of
// bandwidth. Unlabelled rows are only written.
//
// On GPUs with thread block clusters, cross_entropy_grads of bf16 logits without a cap reads them once (cross_entropy_cluster.cu).

#include "surogate/cross_entropy.cuh"

#include "loss.h"

namespace surogate {
namespace {

template <class T>
struct InPlace {
    static constexpr bool has_gradient = true, shrinks = false;

    __device__ __forceinline__ float scale(float loss_scale) const { return loss_scale; }

    __device__ __forceinline__ void store(T* x, int64_t, int64_t at, const float (&values)[Vec<T>::size],
                                          float) const {
        Vec<T>::from_float(values).store(x + at);
    }
    __device__ __forceinline__ void store_one(T* x, int64_t at, float value) const {
        x[at] = from_float<T>(value);
    }
};

}  // namespace

void cross_entropy(const void* logits, const void* targets, void* row_loss, int64_t rows, int64_t vocab_size,
                   int64_t ld, float softcap, int dtype, cudaStream_t stream) {
    constexpr const char* op = "cross_entropy";
    check_logits(op, logits, targets, row_loss, rows, vocab_size, ld, dtype);
    void* read = const_cast<void*>(logits);
    if (dtype == BF16) {
        launch_cross_entropy(static_cast<__nv_bfloat16*>(read), targets, nullptr, row_loss, LossAlone{}, rows,
                             vocab_size, ld, softcap, op, stream);
    } else {
        launch_cross_entropy(static_cast<float*>(read), targets, nullptr, row_loss, LossAlone{}, rows, vocab_size, ld,
                             softcap, op, stream);
    }
}

void cross_entropy_grads(void* logits, const void* targets, const void* loss_scale, void* row_loss, int64_t rows,
                         int64_t vocab_size, int64_t ld, float softcap, int dtype, cudaStream_t stream) {
    constexpr const char* op = "cross_entropy_grads";
    check_logits(op, logits, targets, row_loss, rows, vocab_size, ld, dtype);
    check_pointer(loss_scale, op, "loss_scale", 4);
    if (dtype == FP32) {
        launch_cross_entropy(static_cast<float*>(logits), targets, loss_scale, row_loss, InPlace<float>{}, rows,
                             vocab_size, ld, softcap, op, stream);
    } else if (softcap <= 0 && cluster_holds_row(vocab_size)) {
        cross_entropy_grads_in_cluster(logits, targets, loss_scale, row_loss, rows, vocab_size, ld, stream);
    } else {
        launch_cross_entropy(static_cast<__nv_bfloat16*>(logits), targets, loss_scale, row_loss,
                             InPlace<__nv_bfloat16>{}, rows, vocab_size, ld, softcap, op, stream);
    }
}

}  // namespace surogate
