// Quantizers of an activation with a gate and of its gradient (swiglu.cu, geglu.cu). gate_up [T, 2F] and dout [T, F] are
// bf16, row-major; columns of gate_up are the halves [gate; up]:
//   fp8_NAME      out [T, F], in bf16;  q [T, F]: out in FP8;  q_t [F, T]: q transposed
//   fp8_NAME_bwd  dgate_up [T, 2F] in bf16;  q [T, 2F]: dgate_up in FP8;  q_t [2F, T]: q transposed
//                 hidden_t [F, T]: out of fp8_NAME, in FP8 by a scale of its own, transposed
//
// What is quantized is rounded to bf16 first, with the arithmetic of the bf16 kernels, so q is the same as if they had
// written it. q_t, the bf16 outputs and hidden_t are optional. T and F are multiples of 16; tensors are aligned to 16
// bytes. Scales and amax: scale.h.
//
// Grid: one block of 256 threads per tile of 64 x 128 columns of F. A tile of dgate_up is two tiles F columns apart.
//
// Bytes moved per element of F: 4 read + 1 + 1 written; backward 6 + 2 + 2, and 1 for hidden_t. A measuring launch before,
// of current scaling, reads 4 (6) bytes more.
#pragma once

#include "quantize.cuh"
#include "quantize.h"

namespace surogate {
namespace {

// Gate::of(gate, up) is the activation, Gate::gradient(dout, gate, up) has its gradients `gate` and `up`, and `output`.
template <class Gate>
struct GatedSource {
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
            up[i] = Gate::of(gate[i], up[i]);
        }
        v[0] = Octet::from_float(up);
    }
};

template <class Gate>
struct GatedBwdSource {
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
            const auto gradient = Gate::gradient(d[i], gate[i], up[i]);
            hidden[i] = gradient.output;
            up[i] = gradient.up;
            gate[i] = gradient.gate;
        }
        v[0] = Octet::from_float(gate);
        v[1] = Octet::from_float(up);
        v[2] = Octet::from_float(hidden);
    }
};

inline void check(const char* op, const void* gate_up, const void* q, const void* q_t, const void* wide, const char* name,
           Extent size, const Scale& scale) {
    check_tiles(size.rows, size.columns, op);
    check_pointer(gate_up, op, "gate_up", 16);
    check_pointer(q, op, "q", 16);
    SUROGATE_REQUIRE(is_aligned(q_t, 16), op, "q_t must be aligned to 16 bytes");
    SUROGATE_REQUIRE(is_aligned(wide, 16), op, std::string(name) + " must be aligned to 16 bytes");
    check_scale(scale, op);
}

template <class Gate>
void quantize_gated(const void* gate_up, void* q, void* q_t, void* out, Extent size, int format, const Scale& scale,
                    const char* op, cudaStream_t stream) {
    check(op, gate_up, q, q_t, out, "out", size, scale);
    require_format(format, E4M3, op);
    const GatedSource<Gate> source{static_cast<const __nv_bfloat16*>(gate_up), size.columns};
    const Quantized to{static_cast<uint8_t*>(q), static_cast<uint8_t*>(q_t), static_cast<__nv_bfloat16*>(out)};
    quantize_source<E4M3>(source, to, scale, size.rows, size.columns, op, stream);
}

template <class Gate>
void quantize_gated_bwd(const void* dout, const void* gate_up, void* q, void* q_t, void* dgate_up,
                        const Hidden& hidden, Extent size, int format, const Scale& scale, const char* op,
                        cudaStream_t stream) {
    check(op, gate_up, q, q_t, dgate_up, "dgate_up", size, scale);
    check_pointer(dout, op, "dout", 16);
    require_format(format, E5M2, op);
    const GatedBwdSource<Gate> source{static_cast<const __nv_bfloat16*>(dout),
                                      static_cast<const __nv_bfloat16*>(gate_up), size.columns};
    Quantized to{static_cast<uint8_t*>(q), static_cast<uint8_t*>(q_t), static_cast<__nv_bfloat16*>(dgate_up)};
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

}  // namespace
}  // namespace surogate
