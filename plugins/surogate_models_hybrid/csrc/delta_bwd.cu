// The backward pass of the gated delta rule (delta.h): its parts, and the sums of what they leave.

#include "delta_bwd.cuh"
#include "surogate/dispatch.cuh"

namespace surogate::delta {
namespace {

// Sums the shares of the chunks, in order. A block has a head; a thread adds up every 256th chunk.
template <class A, class B>
__global__ void __launch_bounds__(256)
    sum_partial_kernel(const float* partial, A* da_log, B* ddt_bias, int chunks, int v_heads, bool add_a_log,
                       bool add_dt_bias) {
    __shared__ float scratch[32];
    const int head = blockIdx.x;
    float sums[2] = {};
    for (int at = threadIdx.x; at < chunks; at += 256) {
        const float2 share = *reinterpret_cast<const float2*>(partial + (static_cast<int64_t>(at) * v_heads + head) * 2);
        sums[0] += share.x;
        sums[1] += share.y;
    }
    sums[0] = block_sum(sums[0], scratch);
    sums[1] = block_sum(sums[1], scratch);
    if (threadIdx.x == 0) {
        da_log[head] = from_float<A>(add_a_log ? to_float(da_log[head]) + sums[0] : sums[0]);
        ddt_bias[head] = from_float<B>(add_dt_bias ? to_float(ddt_bias[head]) + sums[1] : sums[1]);
    }
}

struct Workspace {
    Prepared prepared;
    T *d_rest, *d_states;
    float* partial;
    int64_t bytes;
};

Workspace workspace_in(void* begin, const Sizes& sizes) {
    Division division(begin);
    Workspace w{};
    w.prepared = prepared_in(division, sizes);
    w.d_rest = division.next<T>(sizes.tokens * sizes.values_row());
    w.d_states = division.next<T>(static_cast<int64_t>(sizes.chunks) * sizes.v_heads * dim * dim);
    w.partial = division.next<float>(static_cast<int64_t>(sizes.chunks) * sizes.v_heads * 2);
    w.bytes = division.bytes();
    return w;
}

}  // namespace
}  // namespace surogate::delta

namespace surogate {

using namespace delta;

int64_t delta_bwd_workspace(int64_t tokens, int64_t k_heads, int64_t v_heads) {
    return workspace_in(nullptr, checked_sizes(tokens, k_heads, v_heads, "gated_delta_rule_bwd")).bytes;
}

void gated_delta_rule_bwd(const void* dout, const void* qkv, const void* ba, const void* a_log, const void* dt_bias,
                          const void* positions, const void* states, void* dqkv, void* dba, void* da_log, void* ddt_bias,
                          void* workspace, int64_t tokens, int64_t k_heads, int64_t v_heads, bool add_a_log, bool add_dt_bias,
                          int dtype_a_log, int dtype_dt_bias, int64_t shared_memory, cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule_bwd";
    const Sizes sizes = checked_sizes(tokens, k_heads, v_heads, op);
    const Inputs inputs = inputs_of(qkv, ba, a_log, dt_bias, positions, op);
    check_pointer(dout, op, "dout", 16);
    check_pointer(states, op, "states", 16);
    check_pointer(dqkv, op, "dqkv", 16);
    check_pointer(dba, op, "dba", 4);
    check_pointer(da_log, op, "da_log", bytes_of(dtype_a_log));
    check_pointer(ddt_bias, op, "ddt_bias", bytes_of(dtype_dt_bias));
    check_accumulate(add_a_log, dtype_a_log, op);
    check_accumulate(add_dt_bias, dtype_dt_bias, op);
    check_pointer(workspace, op, "workspace", 256);
    const Workspace w = workspace_in(workspace, sizes);
    prepare(inputs, w.prepared, sizes, stream);
    scan_bwd(static_cast<const T*>(dout), w.prepared, sizes, w.d_rest, w.d_states, stream);
    chunks_bwd(static_cast<const T*>(dout), inputs, w.prepared, sizes, static_cast<const T*>(states), w.d_rest, w.d_states,
               {static_cast<T*>(dqkv), static_cast<T*>(dba), w.partial}, shared_memory, stream);
    with_float_type(dtype_a_log, op, "da_log", [&](auto of_a_log) {
        with_float_type(dtype_dt_bias, op, "ddt_bias", [&](auto of_dt_bias) {
            using A = typename decltype(of_a_log)::type;
            using B = typename decltype(of_dt_bias)::type;
            sum_partial_kernel<<<sizes.v_heads, 256, 0, stream>>>(w.partial, static_cast<A*>(da_log),
                                                                  static_cast<B*>(ddt_bias), sizes.chunks, sizes.v_heads,
                                                                  add_a_log, add_dt_bias);
        });
    });
    check_launch(op);
}

}  // namespace surogate
