// fp4_block_dequantize: out[i] = level[code[i]] * scale[i / 16] * global_scale[matrix], rounded to bf16 or fp32.
//
// The first product is exact, the second is rounded to fp32. So the result is bit-identical to that of
// `surogate_qlora_fp4.reference:fp4_block_dequantize`. <surogate/e2m1_weight.cuh> has layouts and the grid; scales are E4M3.
//
// Bytes moved per element, bf16: 0.5 of codes, 0.0625 of scales, 2 written. 4,096 x 12,288: 129.0 MB, a floor of 30.3 us
// at 4.26 TB/s. Instructions per element, counted in the code for SM90: 7.5, of which 1 is a shuffle. An SM issues 128 per
// clock and shuffles 32 times, so at 1.5 GHz all take 14.9 us, the shuffles 7.9 us. Expected: at least 85 % of bandwidth.
#include "fp4.cuh"

namespace surogate {

void fp4_block_dequantize(const Fp4Weight& weight, void* out, const Fp4Shape& shape, int dtype, cudaStream_t stream) {
    e2m1_dequantize<Fp4Scale>(stored(weight, shape, dtype), out, "fp4_block_dequantize", stream);
}

}  // namespace surogate
