// nvfp4_dequantize: of each factor of a product, out [R, C] = level(code) * scale in bf16, which holds it exactly; and
// {alpha, beta} of the product: alpha = (amax_a * amax_b) * (1 / ((36 * E_a) * E_b)), each operation rounded to fp32.
//
//   codes    e2m1 [R, C], two to a byte, the first one in its lower half, aligned to 16 bytes; C is a multiple of 16
//   scales   ue4m3, in atoms of 512 bytes (quantize.cu)
//   amax     fp32 [2] = (largest magnitude, E)
//   out      bf16 [R, C], aligned to 16 bytes, or null: then only the factors are written
//   factors  fp32 [2], aligned to 16 bytes
//
// nvfp4_prepare_stored: the same for a product of a form and a weight as it is stored. Its scales are e4m3 [R, C / 16], row by
// row, and of fp32 [matrices] factors each is of some rows. Products on tensor cores read scales in atoms, so these are
// written, 0 beyond the matrix. Of each matrix alpha = (amax_a * factor) * (1 / (6 * E_a)), at factors[4 * matrix].
//
// A level of E2M1 has at most 2 bits and a scale 4, so the product has 6 of the 8 bits of bf16 and is exact.
//
// One launch for both factors. A block of 256 threads has 8,192 elements, a thread four times eight; a warp reads 128 bytes
// and writes 512 bytes per access. Bytes moved per element: 0.5625 read, 2 written. Floor at 4.3 TB/s for 4,096 x 12,288: 30
// us. About 5 instructions per element. Measured on an H200: two of 8,192 x 12,288 in 136.5 us, 3.78 TB/s.
#include <surogate/check.h>

#include "nvfp4.cuh"
#include "nvfp4.h"

namespace surogate {
namespace {

constexpr const char* op = "nvfp4_dequantize";
constexpr int threads = 256, batch = 4, octet = 8;
constexpr int64_t chunk = threads * batch;  // octets of a block

struct Factor {
    const uint32_t* codes;  // eight to a word
    const uint8_t* scales;
    const float* amax;
    uint4* out;
    unsigned octets, octets_per_row, blocks;
    unsigned matrices;  // of a stored weight, whose factors are at `amax`
};

// Returns two bf16: levels, by the lowest two codes of a word.
__device__ __forceinline__ uint32_t signed_pair(uint32_t levels, uint32_t codes) {
    return levels | (codes << 12 & 0x8000u) | (codes << 24 & 0x80000000u);
}

__device__ __forceinline__ uint32_t times(uint32_t pair, __nv_bfloat162 scale) {
    __nv_bfloat162 x;
    memcpy(&x, &pair, sizeof(x));
    x = __hmul2(x, scale);
    memcpy(&pair, &x, sizeof(x));
    return pair;
}

__device__ __forceinline__ uint4 decoded(uint32_t codes, uint32_t scale) {
    // The upper and lower bytes of the levels 0, 0.5, 1, 1.5 and 2, 3, 4, 6 in bf16.
    constexpr uint32_t upper[2] = {0x3f3f3f00u, 0x40404040u}, lower[2] = {0xc0800000u, 0xc0804000u};
    const __nv_bfloat162 factor = __float2bfloat162_rn(float_of_ue4m3(scale));
    uint32_t pairs[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const uint32_t four = codes >> 16 * k;
        const uint32_t high = __byte_perm(upper[0], upper[1], four & 0x7777u);
        const uint32_t low = __byte_perm(lower[0], lower[1], four & 0x7777u);
        pairs[2 * k] = times(signed_pair(__byte_perm(low, high, 0x5140), four), factor);
        pairs[2 * k + 1] = times(signed_pair(__byte_perm(low, high, 0x7362), four >> 8), factor);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Stored: the scales of b lie row by row.
template <bool Stored>
__global__ void __launch_bounds__(threads)
    dequantize_kernel(const Factor a, const Factor b, float* __restrict__ factors, float beta) {
    if (Stored && blockIdx.x == 0) {
        const float inverse = __fdiv_rn(1.0f, __fmul_rn(6.0f, a.amax[1]));
        for (unsigned i = threadIdx.x; i < b.matrices; i += threads) {
            factors[4 * i] = __fmul_rn(__fmul_rn(a.amax[0], b.amax[i]), inverse);
            factors[4 * i + 1] = beta;
        }
    } else if (!Stored && blockIdx.x == 0 && threadIdx.x == 0) {
        const float range = __fmul_rn(__fmul_rn(36.0f, a.amax[1]), b.amax[1]);
        factors[0] = __fmul_rn(__fmul_rn(a.amax[0], b.amax[0]), __fdiv_rn(1.0f, range));
        factors[1] = beta;
    }
    const bool is_a = blockIdx.x < a.blocks;
    const Factor own = is_a ? a : b;
    const unsigned first = (is_a ? blockIdx.x : blockIdx.x - a.blocks) * static_cast<unsigned>(chunk) + threadIdx.x;
    const unsigned atoms_wide = (own.octets_per_row + 7) / 8;
    uint32_t codes[batch] = {}, scales[batch] = {};
#pragma unroll
    for (int i = 0; i < batch; ++i) {
        const unsigned at = first + i * threads;
        if (at < own.octets) {
            codes[i] = own.codes[at];
            if (Stored && !is_a) {
                scales[i] = own.scales[at / 2];
                continue;
            }
            const unsigned row = at / own.octets_per_row, block = at % own.octets_per_row / 2;
            const int64_t atom = static_cast<int64_t>(row / 128) * atoms_wide + block / 4;
            scales[i] = own.scales[atom * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4];
        }
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
        const unsigned at = first + i * threads;
        if (at < own.octets) {
            own.out[at] = decoded(codes[i], scales[i]);
        }
    }
}

// A thread writes four scales of a row.
__global__ void __launch_bounds__(threads)
    order_kernel(const uint8_t* __restrict__ scales, uint32_t* __restrict__ ordered, unsigned rows, unsigned columns,
                 unsigned atoms_wide, unsigned words) {
    const unsigned at = blockIdx.x * threads + threadIdx.x;
    if (at >= words) {
        return;
    }
    const unsigned atom = at / 128, row = atom / atoms_wide * 128 + at % 4 * 32 + at % 128 / 4;
    const unsigned column = atom % atoms_wide * 4;
    uint32_t word = 0;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
        if (row < rows && column + i < columns) {
            word |= static_cast<uint32_t>(scales[static_cast<int64_t>(row) * columns + column + i]) << 8 * i;
        }
    }
    ordered[at] = word;
}

Factor checked(const Fp4Factor& factor, const char* name, int64_t alignment = 8) {
    const std::string of = std::string(" of ") + name;
    check_pointer(factor.amax, op, ("amax" + of).c_str(), alignment);
    Factor own{};
    own.amax = static_cast<const float*>(factor.amax);
    own.octets_per_row = 1;
    if (factor.out == nullptr) {
        return own;
    }
    check_positive(factor.rows, op, ("rows" + of).c_str());
    check_positive(factor.columns, op, ("columns" + of).c_str());
    SUROGATE_REQUIRE(factor.columns % fp4_block == 0, op,
                     "columns" + of + " must be a multiple of 16, got " + std::to_string(factor.columns));
    check_pointer(factor.codes, op, ("codes" + of).c_str(), 16);
    check_pointer(factor.scales, op, ("scales" + of).c_str(), 16);
    check_pointer(factor.out, op, ("the output" + of).c_str(), 16);
    const int64_t octets = factor.rows * (factor.columns / octet);
    own.codes = static_cast<const uint32_t*>(factor.codes);
    own.scales = static_cast<const uint8_t*>(factor.scales);
    own.out = static_cast<uint4*>(factor.out);
    own.octets = static_cast<unsigned>(to_int(octets, op, "elements / 8"));
    own.octets_per_row = static_cast<unsigned>(factor.columns / octet);
    own.blocks = static_cast<unsigned>(ceil_div(octets, chunk));
    return own;
}

}  // namespace

void nvfp4_dequantize(const Fp4Factor& a, const Fp4Factor& b, void* factors, float beta, cudaStream_t stream) {
    const Factor own_a = checked(a, "a"), own_b = checked(b, "b");
    check_pointer(factors, op, "factors", 16);
    const unsigned blocks = own_a.blocks + own_b.blocks;
    dequantize_kernel<false>
        <<<blocks > 0 ? blocks : 1, threads, 0, stream>>>(own_a, own_b, static_cast<float*>(factors), beta);
    check_launch(op);
}

void nvfp4_prepare_stored(const Fp4Factor& a, const Fp4Stored& b, void* factors, float beta, cudaStream_t stream) {
    const Factor own_a = checked(a, "a");
    Factor own_b = checked({b.codes, b.scales, b.factors, b.out, b.rows, b.columns}, "b", 4);
    check_pointer(factors, op, "factors", 16);
    check_positive(b.matrices, op, "matrices");
    own_b.matrices = static_cast<unsigned>(to_int(b.matrices, op, "matrices"));
    const unsigned blocks = own_a.blocks + own_b.blocks;
    dequantize_kernel<true>
        <<<blocks > 0 ? blocks : 1, threads, 0, stream>>>(own_a, own_b, static_cast<float*>(factors), beta);
    check_launch(op);
    if (b.ordered != nullptr) {
        check_pointer(b.scales, op, "scales of b");
        check_pointer(b.ordered, op, "the ordered scales", 16);
        const int64_t columns = b.columns / fp4_block, wide = ceil_div(columns, 4);
        const auto words = static_cast<unsigned>(to_int(ceil_div(b.rows, 128) * wide * 128, op, "scales"));
        order_kernel<<<static_cast<unsigned>(ceil_div(words, threads)), threads, 0, stream>>>(
            static_cast<const uint8_t*>(b.scales), static_cast<uint32_t*>(b.ordered), static_cast<unsigned>(b.rows),
            static_cast<unsigned>(columns), static_cast<unsigned>(wide), words);
        check_launch(op);
    }
}

}  // namespace surogate
