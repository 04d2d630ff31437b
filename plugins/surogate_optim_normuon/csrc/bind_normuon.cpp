#include <surogate/bind.h>

#include "normuon.h"

void bind_normuon(nanobind::module_& m) {
    using namespace surogate;
    bind_launcher(m, "clear", normuon_clear);
    bind_launcher(m, "momentum",
                  +[](const void* table, int64_t count, int64_t rows, int64_t columns, const void* clip_coef,
                      const void* step, const void* seed, void* x, void* norms, int64_t norms_size, double momentum,
                      int dtype_grad, int dtype_momentum, cudaStream_t stream) {
                      normuon_momentum({table, count, rows, columns}, clip_coef, step, seed, x, norms, norms_size,
                                       momentum, dtype_grad, dtype_momentum, stream);
                  });
    bind_launcher(m, "normalize",
                  +[](const void* table, int64_t count, int64_t rows, int64_t columns, void* x, const void* norms,
                      int64_t norms_size, double safety, double epsilon, cudaStream_t stream) {
                      normuon_normalize({table, count, rows, columns}, x, norms, norms_size, safety, epsilon, stream);
                  });
    bind_launcher(m, "mirror", normuon_mirror);
    bind_launcher(m, "row_moments",
                  +[](const void* table, int64_t count, int64_t rows, int64_t columns, const void* clip_coef,
                      const void* o, void* scales, int64_t scales_size, void* sums, int64_t sums_size, double beta2,
                      cudaStream_t stream) {
                      normuon_row_moments({table, count, rows, columns}, clip_coef, o, scales, scales_size, sums,
                                          sums_size, beta2, stream);
                  });
    bind_launcher(m, "update",
                  +[](const void* table, int64_t count, int64_t rows, int64_t columns, const void* clip_coef,
                      const void* lr, const void* step, const void* seed, const void* o, const void* scales,
                      int64_t scales_size, const void* sums, int64_t sums_size, double weight_decay, bool cautious,
                      double factor, bool divided, int dtype_master, int dtype_copy, cudaStream_t stream) {
                      normuon_update({table, count, rows, columns}, clip_coef, lr, step, seed, o, scales, scales_size,
                                     sums, sums_size,
                                     {weight_decay, cautious, factor, divided, dtype_master, dtype_copy}, stream);
                  });
}
