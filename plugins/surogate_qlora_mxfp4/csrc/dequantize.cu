// mxfp4_dequantize: out[i] = level[code[i]] * 2^(scale[i / 32] - 127), in bf16 or fp32.
//
// The product is exact in fp32, and in bf16 for the scales 2 to 252: the bits are those of
// `surogate_qlora_mxfp4.reference:mxfp4_dequantize`. <surogate/e2m1_weight.cuh> has layouts and the grid; scales are E8M0.
//
// Bytes moved per element, bf16: 0.5 of codes, 0.03125 of scales, 2 written. The experts of a layer of gpt-oss 20B, 796 M
// weights: 2.0 GB, a floor of 473 us at 4.26 TB/s. Expected: at least 85 % of bandwidth, as NVFP4's, which does more.
#include "mxfp4.cuh"

namespace surogate {

void mxfp4_dequantize(const Mxfp4Weight& weight, void* out, const Mxfp4Shape& shape, int dtype, cudaStream_t stream) {
    e2m1_dequantize<Mxfp4Scale>(stored(weight, shape, dtype), out, "mxfp4_dequantize", stream);
}

}  // namespace surogate
