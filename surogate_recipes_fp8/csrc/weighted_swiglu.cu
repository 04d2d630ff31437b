// SwiGLU of the rows of experts, and its gradient, quantized. gate_up [R, 2F] and dout [R, F] are bf16, row-major; columns
// of gate_up are the halves [gate; up]. order [R] int32 is the slot of each row; w = weights.flat[order[row]], fp32:
//   fp8_weighted_swiglu      out [R, F] = silu(gate) * up * w, in bf16;  q [R, F]: out in FP8
//   fp8_weighted_swiglu_bwd  dgate_up [R, 2F] = that of swiglu with dout * w, in bf16;  q [R, 2F]: dgate_up in FP8
//                            d_weights.flat[order[row]] = sum over F of dout * silu(gate) * up, fp32
//
// What is quantized is rounded to bf16 first, and all arithmetic is that of the bf16 kernels (rows.cu of
// surogate-models-moe), so outputs have the same bits as if those had written them. The bf16 outputs are optional; dgate_up
// may be the buffer of gate_up. R and F are multiples of 16; tensors are aligned to 16 bytes. Scales and amax: scale.h.
//
// Grid: forward the tiles of quantize.cuh; backward a warp for each row, since it sums over the row.
//
// Bytes moved per element of F: 4 read + 1 written, backward 6 + 2; with the bf16 outputs 2 and 4 more. Separate ops moved 9
// and 16. Qwen3-30B-A3B with 16,384 tokens (R 131,072, F 768) at 4.26 TB/s: 118 and 189 us, of 213 and 378. A measuring
// launch before, of current scaling, reads 4 (6) bytes more. Not measured.
#include <surogate/reduce.cuh>
#include <surogate/swiglu.cuh>

#include "quantize.cuh"
#include "weighted_swiglu.h"

namespace surogate {
namespace {

struct WeightedSource {
    using Value = Octet;
    struct Raw {
        Octet gate, up;
        float weight;
    };
    static constexpr bool can_store = true;
    static constexpr int outputs = 1, count = 1, blocks = 4;

    const __nv_bfloat16* gate_up;
    const float* weights;
    const int32_t* order;
    int64_t width;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        const __nv_bfloat16* at = gate_up + row * 2 * width + column;
        return {Octet::load(at), Octet::load(at + width), weights[order[row]]};
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[1]) const {
        float gate[8], up[8];
        raw.gate.to_float(gate);
        raw.up.to_float(up);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            up[i] = swiglu<true>(gate[i], up[i]) * raw.weight;
        }
        v[0] = Octet::from_float(up);
    }
};

struct WeightedBwdSource {
    using Value = Octet;
    struct Raw {
        Octet d, gate, up;
        float weight;
    };
    static constexpr int outputs = 2, count = 2, blocks = 2;

    const __nv_bfloat16* dout;
    WeightedSource forward;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        const auto raw = forward.fetch(row, column);
        return {Octet::load(dout + row * forward.width + column), raw.gate, raw.up, raw.weight};
    }
    // Also adds dout * silu(gate) * up to `total`.
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[2], float& total) const {
        float d[8], gate[8], up[8];
        raw.d.to_float(d);
        raw.gate.to_float(gate);
        raw.up.to_float(up);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const auto gradient = SwigluGradient::of<true>(d[i] * raw.weight, gate[i], up[i]);
            total += d[i] * gradient.output;
            gate[i] = gradient.gate;
            up[i] = gradient.up;
        }
        v[0] = Octet::from_float(gate);
        v[1] = Octet::from_float(up);
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[2]) const {
        float total = 0;
        values(raw, v, total);
    }
};

constexpr int threads = 256, warps = threads / 32;

__global__ void __launch_bounds__(threads, 4)
    weighted_bwd_kernel(const WeightedBwdSource source, uint8_t* q, __nv_bfloat16* wide, float* d_weights,
                        const Scale scale) {
    __shared__ uint32_t tops[warps];
    const int64_t row = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;  // rows are a multiple of 16
    const int64_t width = source.forward.width, first = row * 2 * width;
    const float encode = encode_of<E5M2>(scale);
    const bool records = scale.scaling == kDelayed;
    AbsMax top;
    float total = 0;
    for (int64_t column = threadIdx.x % 32 * 8; column < width; column += 32 * 8) {
        auto raw = source.fetch(row, column);
        Octet v[2];
        source.values(raw, v, total);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int64_t at = first + n * width + column;
            if (records) {
                add(top, v[n]);
            }
            if (wide != nullptr) {
                store(v[n], wide + at);
            }
            float x[8];
            v[n].to_float(x);
            uint32_t bytes[2];
            quantize<E5M2>(x, encode, bytes);
            *reinterpret_cast<uint2*>(q + at) = make_uint2(bytes[0], bytes[1]);
        }
    }
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) {
        d_weights[source.forward.order[row]] = total;
    }
    if (records) {
        top.stage(tops);
        __syncthreads();
        AbsMax::raise(tops, scale.amax);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        publish(scale, encode);
    }
}

WeightedSource checked(const WeightedRows& in, const void* q, const void* wide, const char* name, const Scale& scale,
                       const char* op) {
    check_tiles(in.rows, in.width, op);
    check_pointer(in.gate_up, op, "gate_up", 16);
    check_pointer(in.weights, op, "weights", 4);
    check_pointer(in.order, op, "order", 4);
    check_pointer(q, op, "q", 16);
    SUROGATE_REQUIRE(is_aligned(wide, 16), op, std::string(name) + " must be aligned to 16 bytes");
    check_scale(scale, op);
    return {static_cast<const __nv_bfloat16*>(in.gate_up), static_cast<const float*>(in.weights),
            static_cast<const int32_t*>(in.order), in.width};
}

}  // namespace

void fp8_weighted_swiglu(const WeightedRows& in, void* q, void* out, int format, const Scale& scale,
                         cudaStream_t stream) {
    constexpr const char* op = "fp8_weighted_swiglu";
    const WeightedSource source = checked(in, q, out, "out", scale, op);
    require_format(format, E4M3, op);
    const Quantized to{static_cast<uint8_t*>(q), nullptr, static_cast<__nv_bfloat16*>(out)};
    quantize_source<E4M3>(source, to, scale, in.rows, in.width, op, stream);
}

void fp8_weighted_swiglu_bwd(const void* dout, const WeightedRows& in, void* q, void* dgate_up, void* d_weights,
                             int format, const Scale& scale, cudaStream_t stream) {
    constexpr const char* op = "fp8_weighted_swiglu_bwd";
    check_pointer(dout, op, "dout", 16);
    check_pointer(d_weights, op, "d_weights", 4);
    const WeightedBwdSource source{static_cast<const __nv_bfloat16*>(dout),
                                   checked(in, q, dgate_up, "dgate_up", scale, op)};
    require_format(format, E5M2, op);
    if (scale.measures()) {
        measure(source, scale.unless(), scale.measured, in.rows, in.width, op, stream);
    }
    weighted_bwd_kernel<<<to_int(in.rows / warps, op, "rows / 8"), threads, 0, stream>>>(
        source, static_cast<uint8_t*>(q), static_cast<__nv_bfloat16*>(dgate_up), static_cast<float*>(d_weights), scale);
    check_launch(op);
}

}  // namespace surogate
