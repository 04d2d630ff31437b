// fp4_block_amax     amax [matrices, 2] of the dequantized weight
// fp4_block_to_e4m3  its copy in E4M3 with one scale, [R, K] or transposed [K, R]
//
// <surogate/e2m1_weight.cuh> and <surogate/e4m3_copy.cuh> have formulas, layouts, grids and alignments. The bits are those of the
// references in `surogate_qlora_fp4.reference`.
//
// Bytes moved per element: 0.5625 read, 1 written. 4,096 x 12,288: 78.6 MB, a floor of 18.5 us at 4.26 TB/s. For the
// 6.95 G weights in the blocks of Qwen3-8B: 2.5 ms a pass. Instructions per element, counted in the code for SM90:
// 6.5, transposed 8.0 of which 4.5 are of integers or conversions. An SM moves 13.8 elements per clock at 4.26 TB/s and
// 1.5 GHz, so these fill 86 % of its issue slots, and 97 % of those for integers. Expected: at least 80 % of bandwidth.
#include "fp4.cuh"

namespace surogate {

void fp4_block_amax(const Fp4Weight& weight, void* amax, const Fp4Shape& shape, int dtype, cudaStream_t stream) {
    e2m1_amax<Fp4Scale>(stored(weight, shape, dtype), amax, "fp4_block_amax", stream);
}

void fp4_block_to_e4m3(const Fp4Weight& weight, const void* amax, void* copy, void* scale, bool transposed,
                       const Fp4Shape& shape, int dtype, cudaStream_t stream) {
    e2m1_copy<Fp4Scale>(stored(weight, shape, dtype), amax, {copy, scale, transposed}, "fp4_block_to_e4m3", stream);
}

}  // namespace surogate
