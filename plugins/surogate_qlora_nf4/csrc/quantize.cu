// nf4_quantize: code[i] = the level nearest to w[i] * (1 / absmax[b]), absmax[b] = the largest magnitude of a block.
// nf4_compress: 8-bit codes of the absmax of a matrix, the second half of double quantization.
//
//   offset = mean(absmax);  d[b] = absmax[b] - offset;  nested[g] = the largest magnitude of d in a group of 256 blocks
//   absmax_code[b] = the number of the 8-bit map nearest to d[b] * (1 / nested[g])
//
// Arithmetic is fp32, and each operation is rounded separately. The mean is a sum in fp64 in a fixed order, divided in
// fp64 and rounded once. Codes count the midpoints (a + b) / 2 of neighbours that are below the quotient. The reciprocal
// is that of max(x, 1e-38), so a block of zeros has the code of 0. A block with an element that is not finite decodes to
// numbers that are not; with double quantization so does its whole matrix. All bits are those of
// `surogate_qlora_nf4.reference`, except the payloads of NaN.
//
//   w        fp32 or bf16 [R, K], aligned to 16 bytes
//   codes    uint8 [R * K / 2], the first element of a byte in its upper half, aligned to 16 bytes
//   absmax   fp32 [R * K / block]
//   sums     fp64 workspace, one per group
//   nested   fp32, ceil(rows * K / block / 256) per matrix;  offset: fp32 [matrices];  map: fp32 [256]
//
// nf4_quantize: K is a multiple of `block`: 64, 128, 256 or 512. A lane has eight elements of a block, or 16 of 512.
// Bytes moved per element of bf16: 2 + 0.56; the floor for 4,096 x 12,288 at 4.26 TB/s is 30 us. About 20 instructions per
// element search the code. It runs once, when a weight is loaded.
// nf4_compress: three launches over 1/64 of the elements.
#include "nf4.cuh"

namespace surogate {
namespace {

constexpr int threads = 256;
constexpr float smallest = 1e-38f;

// Returns 1 / max(x, smallest); NaN for NaN.
__device__ __forceinline__ float reciprocal(float x) { return __fdiv_rn(1.0f, x < smallest ? smallest : x); }

// Bits of |x|. Their order is that of magnitudes, with NaN above infinity.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ float midpoint(float low, float high) { return __fmul_rn(__fadd_rn(low, high), 0.5f); }

// NaN has the last code.
__device__ __forceinline__ uint32_t nf4_code(float x) {
    uint32_t code = 0;
#pragma unroll
    for (int i = 0; i < 15; ++i) {
        code += !(x <= midpoint(nf4_levels[i], nf4_levels[i + 1]));
    }
    return code;
}

template <class T, int Block>
__global__ void __launch_bounds__(threads)
    quantize_kernel(const T* __restrict__ w, uint32_t* __restrict__ codes, float* __restrict__ absmax, int64_t octets) {
    constexpr int lanes = Block / octet < 32 ? Block / octet : 32;
    constexpr int parts = Block / octet / lanes;
    const int64_t lane = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
    const int64_t block = lane / lanes;
    const int64_t first = block * lanes * parts + lane % lanes;  // octet; the next one of this lane is `lanes` further
    const bool exists = first < octets;                          // all or none of a block
    Words<T> words[parts];
    uint32_t top = 0;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
        words[part] = Words<T>::load(w, (exists ? first + part * lanes : 0) * octet);
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            top = max(top, magnitude(words[part].get(i)));
        }
    }
    top = warp_reduce<lanes>(top, Max{});
    if (!exists) {
        return;
    }
    const float scale = __uint_as_float(top), factor = reciprocal(scale);
    if (lane % lanes == 0) {
        absmax[block] = scale;
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < octet; ++i) {
            word |= nf4_code(__fmul_rn(words[part].get(i), factor)) << 4 * (i ^ 1);
        }
        codes[first + part * lanes] = word;
    }
}

// The blocks of one group: a thread has one.
struct Group {
    int matrix;
    int64_t index;  // among all groups
    int64_t block;  // of this thread, among all blocks
    bool exists;

    __device__ __forceinline__ Group(const FusedRows& fused, int64_t blocks_per_row) {
        const FusedMatrix own = fused.of_chunk(blockIdx.x);
        matrix = own.index;
        index = blockIdx.x;
        block = own.first_row * blocks_per_row + (index - own.first_chunk) * nf4_group + threadIdx.x;
        exists = block < own.end_row * blocks_per_row;
    }
};

__global__ void __launch_bounds__(nf4_group)
    sum_kernel(const float* __restrict__ absmax, double* __restrict__ sums, int64_t blocks_per_row,
               const __grid_constant__ FusedRows fused) {
    __shared__ double scratch[32];
    const Group group(fused, blocks_per_row);
    const double sum = block_reduce(group.exists ? static_cast<double>(absmax[group.block]) : 0.0, scratch, 0.0, Sum{});
    if (threadIdx.x == 0) {
        sums[group.index] = sum;
    }
}

__global__ void __launch_bounds__(threads)
    mean_kernel(const double* __restrict__ sums, float* __restrict__ offset, int64_t blocks_per_row,
                const __grid_constant__ FusedRows fused) {
    __shared__ double scratch[32];
    const FusedMatrix matrix = fused.matrix(blockIdx.x);
    double sum = 0.0;
    for (int64_t i = matrix.first_scale + threadIdx.x; i < matrix.end_scale; i += threads) {
        sum = __dadd_rn(sum, sums[i]);
    }
    sum = block_reduce(sum, scratch, 0.0, Sum{});
    if (threadIdx.x == 0) {
        const int64_t blocks = (matrix.end_row - matrix.first_row) * blocks_per_row;
        offset[matrix.index] = __double2float_rn(__ddiv_rn(sum, static_cast<double>(blocks)));
    }
}

__global__ void __launch_bounds__(nf4_group)
    compress_kernel(const float* __restrict__ absmax, const float* __restrict__ offset, const float* __restrict__ map,
                    uint8_t* __restrict__ codes, float* __restrict__ nested, int64_t blocks_per_row,
                    const __grid_constant__ FusedRows fused) {
    __shared__ uint32_t scratch[32];
    __shared__ float midpoints[256];
    const int i = static_cast<int>(threadIdx.x);
    midpoints[i] = i < 255 ? midpoint(map[i], map[i + 1]) : INFINITY;
    const Group group(fused, blocks_per_row);
    const float d = group.exists ? __fsub_rn(absmax[group.block], offset[group.matrix]) : 0.0f;
    const float top = __uint_as_float(block_reduce(magnitude(d), scratch, 0u, Max{}));  // synchronizes the block
    if (i == 0) {
        nested[group.index] = top;
    }
    if (!group.exists) {
        return;
    }
    const float x = __fmul_rn(d, reciprocal(top));
    int code = 0;  // the number of midpoints below x; NaN has the last code
#pragma unroll
    for (int step = 128; step > 0; step /= 2) {
        if (!(x <= midpoints[code + step - 1])) {
            code += step;
        }
    }
    codes[group.block] = static_cast<uint8_t>(code);
}
static_assert(nf4_group == 256);

template <class T>
void launch_quantize(const void* w, void* codes, void* absmax, const Nf4Shape& shape, int64_t octets, const char* op,
                     cudaStream_t stream) {
    const auto kernel = shape.block == 64    ? quantize_kernel<T, 64>
                        : shape.block == 128 ? quantize_kernel<T, 128>
                        : shape.block == 256 ? quantize_kernel<T, 256>
                                             : quantize_kernel<T, 512>;
    const int64_t lanes = shape.block == 512 ? octets / 2 : octets;
    kernel<<<to_int(ceil_div(lanes, threads), op, "the grid"), threads, 0, stream>>>(
        static_cast<const T*>(w), static_cast<uint32_t*>(codes), static_cast<float*>(absmax), octets);
    check_launch(op);
}

}  // namespace

void nf4_quantize(const void* w, void* codes, void* absmax, const Nf4Shape& shape, int dtype, cudaStream_t stream) {
    constexpr const char* op = "nf4_quantize";
    check_shape(shape, op);
    check_pointer(w, op, "w", 16);
    check_pointer(codes, op, "codes", 16);
    check_pointer(absmax, op, "absmax", 4);
    SUROGATE_REQUIRE(dtype == FP32 || dtype == BF16, op, "w must be fp32 or bf16");
    int64_t rows = 0;
    for (const int64_t matrix : shape.rows) {
        rows += matrix;
    }
    const auto launch = dtype == BF16 ? launch_quantize<__nv_bfloat16> : launch_quantize<float>;
    launch(w, codes, absmax, shape, rows * shape.columns / octet, op, stream);
}

void nf4_compress(const void* absmax, void* sums, void* codes, void* nested, void* offset, const void* map,
                  const Nf4Shape& shape, cudaStream_t stream) {
    constexpr const char* op = "nf4_compress";
    check_shape(shape, op);
    check_pointer(absmax, op, "absmax", 4);
    check_pointer(sums, op, "sums", 8);
    check_pointer(codes, op, "codes");
    check_pointer(nested, op, "nested", 4);
    check_pointer(offset, op, "offset", 4);
    check_pointer(map, op, "map", 4);
    const FusedRows fused = fused_blocks(shape, nf4_group, op);
    const int64_t blocks_per_row = shape.columns / shape.block;
    const unsigned groups = fused.chunks(op);
    sum_kernel<<<groups, nf4_group, 0, stream>>>(static_cast<const float*>(absmax), static_cast<double*>(sums),
                                                 blocks_per_row, fused);
    check_launch(op);
    mean_kernel<<<fused.count, threads, 0, stream>>>(static_cast<const double*>(sums), static_cast<float*>(offset),
                                                     blocks_per_row, fused);
    check_launch(op);
    compress_kernel<<<groups, nf4_group, 0, stream>>>(
        static_cast<const float*>(absmax), static_cast<const float*>(offset), static_cast<const float*>(map),
        static_cast<uint8_t*>(codes), static_cast<float*>(nested), blocks_per_row, fused);
    check_launch(op);
}

}  // namespace surogate
