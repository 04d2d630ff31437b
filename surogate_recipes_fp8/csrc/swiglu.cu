// fp8_swiglu      out = silu(gate) * up, silu(g) = g * sigmoid(g)
// fp8_swiglu_bwd  dgate = dout * up * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))),  dup = dout * silu(gate)
//
// gated.cuh describes tensors and grid. Floor at 4.26 TB/s for 8,192 x 12,288: 142 us, backward 236 us (hidden_t:
// 260 us). Measured on an H200, alone: 85 % of bandwidth or more.
#include <surogate/swiglu.cuh>

#include "gated.cuh"

namespace surogate {
namespace {

struct Swiglu {
    static __device__ __forceinline__ float of(float gate, float up) { return swiglu<true>(gate, up); }
    static __device__ __forceinline__ SwigluGradient gradient(float dout, float gate, float up) {
        return SwigluGradient::of<true>(dout, gate, up);
    }
};

}  // namespace

void fp8_swiglu(const void* gate_up, void* q, void* q_t, void* out, Extent size, int format, const Scale& scale,
                cudaStream_t stream) {
    quantize_gated<Swiglu>(gate_up, q, q_t, out, size, format, scale, "fp8_swiglu", stream);
}

void fp8_swiglu_bwd(const void* dout, const void* gate_up, void* q, void* q_t, void* dgate_up, const Hidden& hidden,
                    Extent size, int format, const Scale& scale, cudaStream_t stream) {
    quantize_gated_bwd<Swiglu>(dout, gate_up, q, q_t, dgate_up, hidden, size, format, scale, "fp8_swiglu_bwd", stream);
}

}  // namespace surogate
