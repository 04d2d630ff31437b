// The gate of the rows of experts, and its gradient, quantized. gate_up [R, 2F] and dout [R, F] are bf16, row-major; columns
// of gate_up are the halves [gate; up] or, interleaved, gate and up in turn. order [R] int32 is the slot of each row;
// w = weights.flat[order[row]], fp32:
//   fp8_weighted_swiglu      out [R, F] = gate(gate, up) * w, in bf16;  q [R, F]: out in FP8
//   fp8_weighted_swiglu_bwd  dgate_up [R, 2F] = that of the gate with dout * w, in bf16;  q [R, 2F]: dgate_up in FP8
//                            d_weights.flat[order[row]] = sum over F of dout * gate(gate, up), fp32
// The gate is SwiGLU, silu(gate) * up, or of another form: clamped_gate.cuh. q has the columns of what it is made of.
//
// What is quantized is rounded to bf16 first, and all arithmetic is that of the bf16 kernels (rows.cu and weighted_gate.cu of
// surogate-models-moe), so outputs have the same bits as if those had written them. The bf16 outputs are optional; dgate_up
// may be the buffer of gate_up. R and F are multiples of 16; tensors are aligned to 16 bytes. Scales and amax: scale.h.
//
// Grid: forward the tiles of quantize.cuh; backward a warp for each row, since it sums over the row.
//
// Bytes moved per element of F: 4 read + 1 written, backward 6 + 2; with the bf16 outputs 2 and 4 more. Separate ops moved 9
// and 16. Qwen3-30B-A3B with 16,384 tokens (R 131,072, F 768) at 4.26 TB/s: 118 and 189 us, of 213 and 378. gpt-oss 20B with
// 4,096 tokens (R 16,384, F 2,880): 55 and 89 us, of 100 and 177; with the bf16 outputs, which adapters of experts read, 78
// and 133. A measuring launch before, of current scaling, reads 4 (6) bytes more. Not measured.
#include <surogate/clamped_gate.cuh>
#include <surogate/gate_columns.cuh>
#include <surogate/reduce.cuh>
#include <surogate/swiglu.cuh>

#include <type_traits>

#include "quantize.cuh"
#include "weighted_swiglu.h"

namespace surogate {
namespace {

struct Swiglu {
    __device__ __forceinline__ float of(float gate, float up) const { return swiglu<true>(gate, up); }
    __device__ __forceinline__ SwigluGradient gradient(float dout, float gate, float up) const {
        return SwigluGradient::of<true>(dout, gate, up);
    }
};

template <class Gate, bool Interleaved>
struct WeightedSource {
    using Value = Octet;
    using Columns = GateColumns<Interleaved>;
    struct Raw {
        Octet first, second;
        float weight;
    };
    static constexpr bool can_store = true;
    static constexpr int outputs = 1, count = 1, blocks = 4;

    const __nv_bfloat16* gate_up;
    const float* weights;
    const int32_t* order;
    int64_t width;
    Gate form;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        const __nv_bfloat16* at = gate_up + row * 2 * width;
        return {Octet::load(at + Columns::first(column)), Octet::load(at + Columns::second(column, width)),
                weights[order[row]]};
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[1]) const {
        float gate[8], up[8];
        raw.first.to_float(gate);
        raw.second.to_float(up);
        Columns::split(gate, up);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            up[i] = form.of(gate[i], up[i]) * raw.weight;
        }
        v[0] = Octet::from_float(up);
    }
};

// The values are the two octets of gate_up, in the order of memory.
template <class Gate, bool Interleaved>
struct WeightedBwdSource {
    using Value = Octet;
    using Forward = WeightedSource<Gate, Interleaved>;
    using Columns = typename Forward::Columns;
    struct Raw {
        Octet d;
        typename Forward::Raw in;
    };
    static constexpr int outputs = 2, count = 2, blocks = 2;

    const __nv_bfloat16* dout;
    Forward forward;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        return {Octet::load(dout + row * forward.width + column), forward.fetch(row, column)};
    }
    // Also adds dout * gate(gate, up) to `total`.
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[2], float& total) const {
        float d[8], gate[8], up[8];
        raw.d.to_float(d);
        raw.in.first.to_float(gate);
        raw.in.second.to_float(up);
        Columns::split(gate, up);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const auto gradient = forward.form.gradient(d[i] * raw.in.weight, gate[i], up[i]);
            total = fmaf(d[i], gradient.output, total);
            gate[i] = gradient.gate;
            up[i] = gradient.up;
        }
        Columns::join(gate, up);
        v[0] = Octet::from_float(gate);
        v[1] = Octet::from_float(up);
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[2]) const {
        float total = 0;
        values(raw, v, total);
    }
};

constexpr int threads = 256, warps = threads / 32;

template <class Gate, bool Interleaved>
__global__ void __launch_bounds__(threads, 4)
    weighted_bwd_kernel(const WeightedBwdSource<Gate, Interleaved> source, uint8_t* q, __nv_bfloat16* wide,
                        float* d_weights, const Scale scale) {
    using Columns = GateColumns<Interleaved>;
    __shared__ uint32_t tops[warps];
    const int64_t row = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;  // rows are a multiple of 16
    const int64_t width = source.forward.width;
    const float encode = encode_of<E5M2>(scale);
    const bool records = scale.scaling == kDelayed;
    AbsMax top;
    float total = 0;
    for (int64_t column = threadIdx.x % 32 * 8; column < width; column += 32 * 8) {
        auto raw = source.fetch(row, column);
        Octet v[2];
        source.values(raw, v, total);
        const int64_t at[2] = {row * 2 * width + Columns::first(column), row * 2 * width + Columns::second(column, width)};
        uint32_t bytes[2][2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (records) {
                add(top, v[n]);
            }
            if (wide != nullptr) {
                store(v[n], wide + at[n]);
            }
            float x[8];
            v[n].to_float(x);
            quantize<E5M2>(x, encode, bytes[n]);
            if constexpr (!Interleaved) {
                *reinterpret_cast<uint2*>(q + at[n]) = make_uint2(bytes[n][0], bytes[n][1]);
            }
        }
        if constexpr (Interleaved) {
            *reinterpret_cast<uint4*>(q + at[0]) = make_uint4(bytes[0][0], bytes[0][1], bytes[1][0], bytes[1][1]);
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

template <class Gate, bool Interleaved>
void launch_bwd(const WeightedSource<Gate, Interleaved>& forward, const void* dout, void* q, void* dgate_up,
                void* d_weights, const Scale& scale, int64_t rows, const char* op, cudaStream_t stream) {
    const WeightedBwdSource<Gate, Interleaved> source{static_cast<const __nv_bfloat16*>(dout), forward};
    if (scale.measures()) {
        measure(source, scale.unless(), scale.measured, rows, forward.width, op, stream);
    }
    weighted_bwd_kernel<<<to_int(rows / warps, op, "rows / 8"), threads, 0, stream>>>(
        source, static_cast<uint8_t*>(q), static_cast<__nv_bfloat16*>(dgate_up), static_cast<float*>(d_weights), scale);
    check_launch(op);
}

void check(const WeightedRows& in, const GateForm& form, const void* q, const void* wide, const char* name,
           const Scale& scale, const char* op) {
    check_tiles(in.rows, in.width, op);
    check_pointer(in.gate_up, op, "gate_up", 16);
    check_pointer(in.weights, op, "weights", 4);
    check_pointer(in.order, op, "order", 4);
    check_pointer(q, op, "q", 16);
    SUROGATE_REQUIRE(is_aligned(wide, 16), op, std::string(name) + " must be aligned to 16 bytes");
    SUROGATE_REQUIRE(form.limit >= 0, op, "limit must be positive, or 0 for none, got " + std::to_string(form.limit));
    check_scale(scale, op);
}

// Calls function(source) with the source of these rows, by the gate of `form`.
template <class Function>
void with_source(const WeightedRows& in, const GateForm& form, Function&& function) {
    const auto call = [&](auto gate, auto interleaved) {
        function(WeightedSource<decltype(gate), decltype(interleaved)::value>{
            static_cast<const __nv_bfloat16*>(in.gate_up), static_cast<const float*>(in.weights),
            static_cast<const int32_t*>(in.order), in.width, gate});
    };
    const ClampedGate gate(form.alpha, form.limit, form.offset);
    if (form.interleaved) {
        call(gate, std::true_type{});
    } else if (form.alpha == 1 && form.limit == 0 && form.offset == 0) {
        call(Swiglu{}, std::false_type{});
    } else {
        call(gate, std::false_type{});
    }
}

}  // namespace

void fp8_weighted_swiglu(const WeightedRows& in, const GateForm& form, void* q, void* out, int format,
                         const Scale& scale, cudaStream_t stream) {
    constexpr const char* op = "fp8_weighted_swiglu";
    check(in, form, q, out, "out", scale, op);
    require_format(format, E4M3, op);
    const Quantized to{static_cast<uint8_t*>(q), nullptr, static_cast<__nv_bfloat16*>(out)};
    with_source(in, form, [&](const auto& source) {
        quantize_source<E4M3>(source, to, scale, in.rows, in.width, op, stream);
    });
}

void fp8_weighted_swiglu_bwd(const void* dout, const WeightedRows& in, const GateForm& form, void* q, void* dgate_up,
                             void* d_weights, int format, const Scale& scale, cudaStream_t stream) {
    constexpr const char* op = "fp8_weighted_swiglu_bwd";
    check_pointer(dout, op, "dout", 16);
    check_pointer(d_weights, op, "d_weights", 4);
    check(in, form, q, dgate_up, "dgate_up", scale, op);
    require_format(format, E5M2, op);
    with_source(in, form, [&](const auto& forward) {
        launch_bwd(forward, dout, q, dgate_up, d_weights, scale, in.rows, op, stream);
    });
}

}  // namespace surogate
