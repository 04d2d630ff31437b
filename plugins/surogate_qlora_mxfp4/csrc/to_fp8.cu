// mxfp4_amax     amax [matrices, 2] of the dequantized weight
// mxfp4_to_e4m3  its copy in E4M3 with one scale, [R, K] or transposed [K, R]
// mxfp4_to_e5m2  the same in E5M2, with a power of two as scale
// Copies of some matrices have the scale of all `of` matrices of amax.
//
// <surogate/e2m1_weight.cuh> and <surogate/e4m3_copy.cuh> have formulas, layouts, grids and alignments. The bits are those of the
// references in `surogate_qlora_mxfp4.reference`.
//
// Bytes moved per element: 0.53125 read, 1 written. A copy in E5M2 is exact where the exponents of blocks that share its scale
// spread by at most 28. In E4M3 a power of two as scale would be exact for 14; 448 / amax, the scale of all formats, rounds.
#include "mxfp4.cuh"

namespace surogate {

void mxfp4_amax(const Mxfp4Weight& weight, void* amax, const Mxfp4Shape& shape, int dtype, cudaStream_t stream) {
    e2m1_amax<Mxfp4Scale>(stored(weight, shape, dtype), amax, "mxfp4_amax", stream);
}

void mxfp4_to_e4m3(const Mxfp4Weight& weight, const void* amax, int64_t of, void* copy, void* scale,
                   bool transposed, const Mxfp4Shape& shape, int dtype, cudaStream_t stream) {
    e2m1_copy<Mxfp4Scale>(stored(weight, shape, dtype), amax, {copy, scale, transposed, of}, "mxfp4_to_e4m3", stream);
}

void mxfp4_to_e5m2(const Mxfp4Weight& weight, const void* amax, int64_t of, void* copy, void* scale,
                   bool transposed, const Mxfp4Shape& shape, int dtype, cudaStream_t stream) {
    e2m1_copy<Mxfp4Scale, E5m2Code>(stored(weight, shape, dtype), amax, {copy, scale, transposed, of}, "mxfp4_to_e5m2", stream);
}

}  // namespace surogate
