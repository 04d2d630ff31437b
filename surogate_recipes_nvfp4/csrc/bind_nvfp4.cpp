#include <surogate/bind.h>

#include "nvfp4.h"

using namespace surogate;

void bind_nvfp4(nanobind::module_& m) {
    bind_launcher(m, "nvfp4_quantize", +[](const void* x, void* codes, void* scales, void* amax, void* column_codes,
                                           void* column_scales, void* column_amax, void* measured, int64_t rows,
                                           int64_t columns, bool square, bool hadamard, bool four_over_six,
                                           bool stochastic, const void* micro_step, const void* seed,
                                           int64_t random_stream, bool is_measured, int64_t first_row,
                                           cudaStream_t stream) {
        nvfp4_quantize(x, {codes, scales, amax}, {column_codes, column_scales, column_amax}, measured, rows, columns,
                       {square, hadamard, four_over_six, stochastic, micro_step, seed, random_stream, is_measured, first_row},
                       stream);
    });
    bind_launcher(m, "nvfp4_swiglu", nvfp4_swiglu);
    bind_launcher(m, "nvfp4_swiglu_bwd", nvfp4_swiglu_bwd);
    bind_launcher(m, "nvfp4_dequantize", +[](const void* codes_a, const void* scales_a, const void* amax_a, void* a,
                                             int64_t rows_a, int64_t columns_a, const void* codes_b,
                                             const void* scales_b, const void* amax_b, void* b, int64_t rows_b,
                                             int64_t columns_b, void* factors, float beta, cudaStream_t stream) {
        nvfp4_dequantize({codes_a, scales_a, amax_a, a, rows_a, columns_a},
                         {codes_b, scales_b, amax_b, b, rows_b, columns_b}, factors, beta, stream);
    });
    bind_launcher(m, "nvfp4_prepare_stored", +[](const void* codes_a, const void* scales_a, const void* amax_a, void* a,
                                                 int64_t rows_a, int64_t columns_a, const void* codes_b,
                                                 const void* scales_b, const void* factors_b, int64_t matrices, void* b,
                                                 void* ordered, int64_t rows_b, int64_t columns_b, void* factors,
                                                 float beta, cudaStream_t stream) {
        nvfp4_prepare_stored({codes_a, scales_a, amax_a, a, rows_a, columns_a},
                             {codes_b, scales_b, factors_b, matrices, b, ordered, rows_b, columns_b}, factors, beta, stream);
    });
    bind_launcher(m, "nvfp4_measure", nvfp4_measure);
    bind_launcher(m, "nvfp4_report", nvfp4_report);
}
