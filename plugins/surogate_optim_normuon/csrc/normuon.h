// Launchers of normuon.cu, which documents their arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// Matrices of equal shape and dtypes: `table` has an entry for each.
struct NormuonBatch {
    const void* table;
    int64_t count, rows, columns;
};

void normuon_clear(const void* table, int64_t count, cudaStream_t stream);

void normuon_momentum(const NormuonBatch& batch, const void* clip_coef, const void* step, const void* seed, void* x,
                      void* norms, int64_t norms_size, double momentum, int dtype_grad, int dtype_momentum,
                      cudaStream_t stream);

void normuon_normalize(const NormuonBatch& batch, void* x, const void* norms, int64_t norms_size, double safety,
                       double epsilon, cudaStream_t stream);

void normuon_mirror(void* square, int64_t count, int64_t side, int64_t height, cudaStream_t stream);

void normuon_row_moments(const NormuonBatch& batch, const void* clip_coef, const void* o, void* scales,
                         int64_t scales_size, void* sums, int64_t sums_size, double beta2, cudaStream_t stream);

// How a batch is updated, apart from what changes from step to step.
struct NormuonUpdate {
    double weight_decay;
    bool cautious;
    double factor;      // of the update
    bool divided;       // whether the factor is divided by the norm of the orthogonalized matrix
    int dtype_master;
    int dtype_copy;     // negative: no work copies
};

void normuon_update(const NormuonBatch& batch, const void* clip_coef, const void* lr, const void* step, const void* seed,
                    const void* o, const void* scales, int64_t scales_size, const void* sums, int64_t sums_size,
                    const NormuonUpdate& update, cudaStream_t stream);

}  // namespace surogate
