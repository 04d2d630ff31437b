// Launchers of the NVFP4 kernels. The .cu files document formulas and layouts.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace surogate {

// A form of a matrix: codes aligned to 16 bytes, scales to 16, amax to 8. All may be null if the form is not written.
struct Fp4Form {
    void *codes, *scales, *amax;
};

struct Fp4Quantization {
    bool square, hadamard, four_over_six, stochastic;
    const void *micro_step, *seed;  // int32 and int64 in device memory, with `stochastic`
    int64_t stream;
    bool is_measured;
    int64_t first_row;  // of the whole tensor, a multiple of 16: where its random bits begin
};

// `measured`: 16 bytes, aligned to 16. With `is_measured` they hold the magnitudes of x (swiglu.cu), else they are workspace.
void nvfp4_quantize(const void* x, const Fp4Form& rows, const Fp4Form& columns, void* measured, int64_t n_rows,
                    int64_t n_columns, const Fp4Quantization& how, cudaStream_t stream);

void nvfp4_swiglu(const void* gate_up, void* out, void* measured, int64_t rows, int64_t width, cudaStream_t stream);

void nvfp4_swiglu_bwd(const void* dout, const void* gate_up, void* dgate_up, void* measured, int64_t rows, int64_t width,
                      cudaStream_t stream);

// A factor of a product: its form, and where its numbers are written in bf16, aligned to 16 bytes, or null.
struct Fp4Factor {
    const void *codes, *scales, *amax;
    void* out;
    int64_t rows, columns;
};

// `factors`: {alpha, beta} in fp32, aligned to 16 bytes.
void nvfp4_dequantize(const Fp4Factor& a, const Fp4Factor& b, void* factors, float beta, cudaStream_t stream);

// A weight that is stored with its scales row by row, and with a factor for each of its matrices.
struct Fp4Stored {
    const void *codes, *scales, *factors;
    int64_t matrices;
    void* out;      // its numbers in bf16, aligned to 16 bytes, or null
    void* ordered;  // its scales in atoms, aligned to 16 bytes, or null
    int64_t rows, columns;
};

// `factors`: four fp32 for each matrix, {alpha, beta, unused, unused}, aligned to 16 bytes.
void nvfp4_prepare_stored(const Fp4Factor& a, const Fp4Stored& b, void* factors, float beta, cudaStream_t stream);

constexpr int fp4_figures = 3, fp4_of_a_row = 5;

// `sums`: fp32 [rows, fp4_of_a_row].
void nvfp4_measure(const void* x, const void* codes, const void* scales, const void* amax, void* sums, int64_t rows,
                   int64_t columns, cudaStream_t stream);

// `sums`: addresses of those of each tensor, in device memory. `table`: fp32 [tensors, fp4_figures].
void nvfp4_report(const void* sums, void* table, int64_t tensors, int64_t rows, cudaStream_t stream);

}  // namespace surogate
