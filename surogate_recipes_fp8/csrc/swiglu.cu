// gate_up [T, 2F], columns are the halves [gate; up]; silu(g) = g * sigmoid(g):
//   fp8_swiglu      out [T, F] = silu(gate) * up, in bf16;  q [T, F]: out in FP8;  q_t [F, T]: q transposed
//   fp8_swiglu_bwd  dgate_up [T, 2F] in bf16:  dgate = dout * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))),
//                                              dup   = dout * silu(gate)
//                   q [T, 2F]: dgate_up in FP8;  q_t [2F, T]: q transposed
//                   hidden_t [F, T]: out of fp8_swiglu, in FP8 by a scale of its own, transposed
//
// gate_up and dout are bf16, row-major. What is quantised is rounded to bf16 first, with the arithmetic of the bf16
// kernels (swiglu.cu of surogate-recipe-bf16), so q is the same as if they had written it. q_t, the bf16 outputs and
// hidden_t are optional. T and F are multiples of 16; tensors are aligned to 16 bytes. Scales and amax: scale.h.
//
// Grid: one block of 256 threads per tile of 64 x 128 columns of F. A tile of dgate_up is two tiles F columns apart.
//
// Bytes moved per element of F: 4 read + 1 + 1 written; backward 6 + 2 + 2, and 1 for hidden_t. Floor at 4.26 TB/s for
// 8,192 x 12,288: 142 us, backward 236 us (hidden_t: 260 us). Measured on an H200, alone: 85 % of bandwidth or more. A
// measuring launch before, of current scaling, reads 4 (6) bytes more.
#include <surogate/swiglu.cuh>

#include "quantize.cuh"
#include "quantize.h"

namespace surogate {
namespace {

struct SwigluSource {
    using Value = Octet;
    struct Raw {
        Octet gate, up;
    };
    static constexpr bool can_store = true;
    static constexpr int outputs = 1, count = 1, blocks = 4;

    const __nv_bfloat16* gate_up;
    int64_t width;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        const __nv_bfloat16* at = gate_up + row * 2 * width + column;
        return {Octet::load(at), Octet::load(at + width)};
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[1]) const {
        float gate[8], up[8];
        raw.gate.to_float(gate);
        raw.up.to_float(up);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            up[i] = swiglu<true>(gate[i], up[i]);
        }
        v[0] = Octet::from_float(up);
    }
};

struct SwigluBwdSource {
    using Value = Octet;
    struct Raw {
        Octet d, gate, up;
    };
    static constexpr bool can_store = true;
    static constexpr int outputs = 2, count = 3, blocks = 2;  // the third value is the hidden activation

    const __nv_bfloat16* dout;
    const __nv_bfloat16* gate_up;
    int64_t width;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        const __nv_bfloat16* at = gate_up + row * 2 * width + column;
        return {Octet::load(dout + row * width + column), Octet::load(at), Octet::load(at + width)};
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[3]) const {
        float d[8], gate[8], up[8], hidden[8];
        raw.d.to_float(d);
        raw.gate.to_float(gate);
        raw.up.to_float(up);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const auto gradient = SwigluGradient::of<true>(d[i], gate[i], up[i]);
            hidden[i] = gradient.output;
            up[i] = gradient.up;
            gate[i] = gradient.gate;
        }
        v[0] = Octet::from_float(gate);
        v[1] = Octet::from_float(up);
        v[2] = Octet::from_float(hidden);
    }
};

void check(const char* op, const void* gate_up, const void* q, const void* q_t, const void* wide, const char* name,
           Extent size, const Scale& scale) {
    check_tiles(size.rows, size.columns, op);
    check_pointer(gate_up, op, "gate_up", 16);
    check_pointer(q, op, "q", 16);
    SUROGATE_REQUIRE(is_aligned(q_t, 16), op, "q_t must be aligned to 16 bytes");
    SUROGATE_REQUIRE(is_aligned(wide, 16), op, std::string(name) + " must be aligned to 16 bytes");
    check_scale(scale, op);
}

}  // namespace

void fp8_swiglu(const void* gate_up, void* q, void* q_t, void* out, Extent size, int format, const Scale& scale,
                cudaStream_t stream) {
    constexpr const char* op = "fp8_swiglu";
    check(op, gate_up, q, q_t, out, "out", size, scale);
    require_format(format, E4M3, op);
    const SwigluSource source{static_cast<const __nv_bfloat16*>(gate_up), size.columns};
    const Quantised to{static_cast<uint8_t*>(q), static_cast<uint8_t*>(q_t), static_cast<__nv_bfloat16*>(out)};
    quantize_source<E4M3>(source, to, scale, size.rows, size.columns, op, stream);
}

void fp8_swiglu_bwd(const void* dout, const void* gate_up, void* q, void* q_t, void* dgate_up, const Hidden& hidden,
                    Extent size, int format, const Scale& scale, cudaStream_t stream) {
    constexpr const char* op = "fp8_swiglu_bwd";
    check(op, gate_up, q, q_t, dgate_up, "dgate_up", size, scale);
    check_pointer(dout, op, "dout", 16);
    require_format(format, E5M2, op);
    const SwigluBwdSource source{static_cast<const __nv_bfloat16*>(dout), static_cast<const __nv_bfloat16*>(gate_up),
                                 size.columns};
    Quantised to{static_cast<uint8_t*>(q), static_cast<uint8_t*>(q_t), static_cast<__nv_bfloat16*>(dgate_up)};
    if (hidden.hidden_t == nullptr) {
        return quantize_source<E5M2>(source, to, scale, size.rows, size.columns, op, stream);
    }
    require_format(hidden.format, E4M3, op);
    check_pointer(hidden.hidden_t, op, "hidden_t", 16);
    check_pointer(hidden.scale, op, "the scale of the hidden activation", 8);
    to.hidden_t = static_cast<uint8_t*>(hidden.hidden_t);
    to.hidden_scale = static_cast<const float*>(hidden.scale);
    if (scale.measures()) {
        measure(source, scale.unless(), scale.measured, size.rows, size.columns, op, stream);
    }
    launch_quantize<E5M2, E4M3>(source, to, scale, size.rows, size.columns, op, stream);
}

}  // namespace surogate
