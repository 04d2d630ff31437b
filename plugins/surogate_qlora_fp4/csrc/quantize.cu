// fp4_block_quantize: w to NVFP4, in blocks of 16 elements of a row, each matrix with a global scale of its own.
//
//   amax = max |w| of the matrix;  E = 256 with four_over_six, otherwise 448
//   global_scale = amax / (6 E)
//
// Without four_over_six, as in ModelOpt:
//   s = E4M3(max |block| / (6 global_scale)), 1 for a block of zeros;  code = E2M1(w / (s * global_scale)), 0 stays 0
//
// With it, as in TransformerEngine:
//   encode = min(6 E / amax, FLT_MAX), 1 if amax is 0 or not finite;  decode = 1 / encode
//   base = max |block| / 6 * encode;  candidates for s: E4M3(min(base, 448)), E4M3(min(base * 1.5, 448))
//   code = E2M1(w * min(1 / (s * decode), FLT_MAX))
//
// Of the two candidates, whose largest codes are 6 and 4, the second is chosen if its squared error is smaller: the sum
// of (level * s * amax / (6 E) - w)^2 over the block, in order. Each operation is rounded to fp32 separately, and codes
// are rounded to nearest even. A NaN has the code 7; an element that is not finite makes the global scale so, and with it
// all decoded elements of the matrix. All bits are those of `surogate_qlora_fp4.reference`, except the payloads of NaN.
//
//   w              fp32 or bf16 [R, K], aligned to 16 bytes; K is a multiple of 16
//   codes          uint8 [R, K / 2], the first element of a byte in its lower half, aligned to 16 bytes
//   scales         e4m3 [R, K / 16]
//   global_scales  fp32 [matrices]
//   amax           workspace: bits of floats, uint32 [matrices]
//
// Two launches: the amax, and the codes. A thread has a block of 16 elements, and a thread block 4,096 elements of a
// matrix. A maximum of bits is the same in any order.
//
// Bytes moved per element of bf16: 4 read, 0.56 written; the floor for 4,096 x 12,288 at 4.26 TB/s is 54 us. With
// four_over_six about 100 instructions per element, most of them divisions. It runs once, when a weight is loaded.
#include <cfloat>

#include "fp4.cuh"

namespace surogate {
namespace {

constexpr const char* op = "fp4_block_quantize";
constexpr int threads = 256;

// The elements of a block.
struct Block {
    float x[fp4_block];

    template <class T>
    __device__ __forceinline__ Block(const T* w, int64_t block) {
#pragma unroll
        for (int part = 0; part < fp4_block / octet; ++part) {
            const auto words = Words<T>::load(w, block * fp4_block + part * octet);
#pragma unroll
            for (int i = 0; i < octet; ++i) {
                x[part * octet + i] = words.get(i);
            }
        }
    }

    // Returns the bits of the largest magnitude. NaN is above infinity.
    __device__ __forceinline__ uint32_t top() const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < fp4_block; ++i) {
            bits = max(bits, __float_as_uint(x[i]) & 0x7fffffffu);
        }
        return bits;
    }
};

// Returns the smaller number; NaN if x is NaN.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

// What the blocks of a matrix share.
struct Matrix {
    float amax;
    float range;  // 6 E
    float scale;  // of the whole matrix
    float encode;
    float decode;

    __device__ __forceinline__ Matrix(float amax, bool four_over_six) : amax(amax), range(four_over_six ? 1536.0f : 2688.0f) {
        scale = __fdiv_rn(amax, range);
        encode = amax > 0.0f && amax <= FLT_MAX ? at_most(__fdiv_rn(range, amax), FLT_MAX) : 1.0f;
        decode = __fdiv_rn(1.0f, encode);
    }

    __device__ __forceinline__ float encode_of(float scale) const {
        return at_most(__fdiv_rn(1.0f, __fmul_rn(scale, decode)), FLT_MAX);
    }
};

struct Quantized {
    uint32_t scale;
    uint2 codes;
};

// Quantizes a block with this scale. `scaled` maps an element to units of its level.
template <class Scaled>
__device__ __forceinline__ Quantized quantized(const Block& block, uint32_t scale, const Scaled& scaled) {
    Quantized result{scale, make_uint2(0, 0)};
#pragma unroll
    for (int i = 0; i < octet; ++i) {
        result.codes.x |= e2m1_of(scaled(block.x[i])) << 4 * i;
        result.codes.y |= e2m1_of(scaled(block.x[octet + i])) << 4 * i;
    }
    return result;
}

__device__ __forceinline__ Quantized multiplied(const Block& block, const Matrix& matrix, uint32_t scale) {
    const float encode = matrix.encode_of(float_of_e4m3(scale));
    return quantized(block, scale, [=](float x) { return __fmul_rn(x, encode); });
}

__device__ __forceinline__ Quantized divided(const Block& block, const Matrix& matrix, uint32_t scale) {
    const float step = __fmul_rn(float_of_e4m3(scale), matrix.scale);
    return quantized(block, scale, [=](float x) { return x == 0.0f ? x : __fdiv_rn(x, step); });
}

__device__ __forceinline__ float squared_error(const Block& block, const Matrix& matrix, const Quantized& candidate) {
    const float scale = float_of_e4m3(candidate.scale);
    float error = 0.0f;
#pragma unroll
    for (int i = 0; i < fp4_block; ++i) {
        const float level = float_of_e2m1((i < octet ? candidate.codes.x : candidate.codes.y) >> 4 * (i % octet));
        const float value = __fdiv_rn(__fmul_rn(__fmul_rn(level, scale), matrix.amax), matrix.range);
        const float d = __fsub_rn(value, block.x[i]);
        error = __fadd_rn(error, __fmul_rn(d, d));
    }
    return error;
}

// The block of 16 elements of a thread.
struct Place {
    FusedMatrix matrix;
    int64_t block;
    bool exists;

    __device__ __forceinline__ Place(const FusedRows& fused, int64_t blocks_per_row) {
        matrix = fused.of_chunk(blockIdx.x);
        block = matrix.first_row * blocks_per_row + (blockIdx.x - matrix.first_chunk) * threads + threadIdx.x;
        exists = block < matrix.end_row * blocks_per_row;
    }
};

template <class T>
__global__ void __launch_bounds__(threads) amax_kernel(const T* __restrict__ w, uint32_t* __restrict__ amax,
                                                       int64_t blocks_per_row, const __grid_constant__ FusedRows fused) {
    const Place place(fused, blocks_per_row);
    const uint32_t top = __reduce_max_sync(full_warp, place.exists ? Block(w, place.block).top() : 0u);
    if (threadIdx.x % 32 == 0) {
        atomicMax(amax + place.matrix.index, top);
    }
}

template <class T>
__global__ void __launch_bounds__(threads)
    quantize_kernel(const T* __restrict__ w, const float* __restrict__ amax, uint2* __restrict__ codes,
                    uint8_t* __restrict__ scales, float* __restrict__ global_scales, int64_t blocks_per_row,
                    bool four_over_six, const __grid_constant__ FusedRows fused) {
    const Place place(fused, blocks_per_row);
    if (!place.exists) {
        return;
    }
    const Matrix matrix(amax[place.matrix.index], four_over_six);
    if (place.block == place.matrix.first_row * blocks_per_row) {
        global_scales[place.matrix.index] = matrix.scale;
    }
    const Block block(w, place.block);
    const float top = __uint_as_float(block.top());
    Quantized result;
    if (four_over_six) {
        const float base = __fmul_rn(__fdiv_rn(top, 6.0f), matrix.encode);
        result = multiplied(block, matrix, e4m3_of(at_most(base, 448.0f)));
        const Quantized four = multiplied(block, matrix, e4m3_of(at_most(__fmul_rn(base, 1.5f), 448.0f)));
        if (squared_error(block, matrix, four) < squared_error(block, matrix, result)) {
            result = four;
        }
    } else {
        const float scale = top == 0.0f ? 1.0f : __fdiv_rn(top, __fmul_rn(6.0f, matrix.scale));
        result = divided(block, matrix, e4m3_of(scale));
    }
    codes[place.block] = result.codes;
    scales[place.block] = static_cast<uint8_t>(result.scale);
}

template <class T>
void launch(const void* w, const Fp4Weight& weight, void* amax, const Fp4Shape& shape, bool four_over_six,
            cudaStream_t stream) {
    const auto chunks = [&](int64_t rows) { return ceil_div(rows * shape.columns, int64_t{threads} * fp4_block); };
    const FusedRows fused = fused_rows(shape.rows, chunks, [](int64_t) { return int64_t{1}; }, op);
    const int64_t blocks_per_row = shape.columns / fp4_block;
    const unsigned grid = fused.chunks(op);
    check_cuda(cudaMemsetAsync(amax, 0, fused.count * sizeof(uint32_t), stream), op);
    amax_kernel<T><<<grid, threads, 0, stream>>>(static_cast<const T*>(w), static_cast<uint32_t*>(amax), blocks_per_row,
                                                 fused);
    check_launch(op);
    quantize_kernel<T><<<grid, threads, 0, stream>>>(
        static_cast<const T*>(w), static_cast<const float*>(amax), static_cast<uint2*>(weight.codes),
        static_cast<uint8_t*>(weight.scales), static_cast<float*>(weight.global_scales), blocks_per_row, four_over_six,
        fused);
    check_launch(op);
}

}  // namespace

void fp4_block_quantize(const void* w, const Fp4Weight& weight, void* amax, const Fp4Shape& shape, bool four_over_six,
                        int dtype, cudaStream_t stream) {
    check_weight<Fp4Scale>(stored(weight, shape, dtype), op);
    check_pointer(w, op, "w", 16);
    check_pointer(amax, op, "amax", 4);
    (dtype == BF16 ? launch<__nv_bfloat16> : launch<float>)(w, weight, amax, shape, four_over_six, stream);
}

}  // namespace surogate
