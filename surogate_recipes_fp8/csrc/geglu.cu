// fp8_geglu      out = gelu(gate) * up, gelu by its tanh formula
// fp8_geglu_bwd  the gradients of gate and up (surogate/geglu.cuh)
//
// gated.cuh describes tensors and grid.
#include <surogate/geglu.cuh>

#include "gated.cuh"

namespace surogate {
namespace {

struct Geglu {
    static __device__ __forceinline__ float of(float gate, float up) { return geglu(gate, up); }
    static __device__ __forceinline__ GegluGradient gradient(float dout, float gate, float up) {
        return GegluGradient::of(dout, gate, up);
    }
};

}  // namespace

void fp8_geglu(const void* gate_up, void* q, void* q_t, void* out, Extent size, int format, const Scale& scale,
                cudaStream_t stream) {
    quantize_gated<Geglu>(gate_up, q, q_t, out, size, format, scale, "fp8_geglu", stream);
}

void fp8_geglu_bwd(const void* dout, const void* gate_up, void* q, void* q_t, void* dgate_up, const Hidden& hidden,
                    Extent size, int format, const Scale& scale, cudaStream_t stream) {
    quantize_gated_bwd<Geglu>(dout, gate_up, q, q_t, dgate_up, hidden, size, format, scale, "fp8_geglu_bwd", stream);
}

}  // namespace surogate
