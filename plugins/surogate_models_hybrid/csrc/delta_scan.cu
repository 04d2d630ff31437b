// The state of the gated delta rule from chunk to chunk, and the outputs (delta.h). The chain of chunks is what takes time.
//
// A warp has 16 columns of values of a head: their rows of S^T [16, D] stay in its registers, in fp32, from chunk to chunk. All
// products are of transposes, [values, tokens] and [values, keys], so that a result is the operand of the next product as
// it is, and warps exchange nothing: U^T = S^T K^T, R^T = beta (V^T - reads U^T), V'^T = R^T A^T,
// O^T = reads (S^T Q^T) + V'^T P^T, S^T <- carry S^T + (left V'^T) K. Operands are bf16. A and P are lower triangular:
// 10 of their 16 tiles of 16 x 16 are computed.
//
// Grid: value heads x slices of the values, and lanes that take the pieces of the row in turn: a piece is the chunks from one
// in which a document begins to the next such one, which it computes the outputs of too, as their first tokens need its
// state. The piece that begins there computes that chunk once more, for the state behind it.
//
// Products of a chunk and warp: 232 of 16 x 8 x 16, 1.0 us at the rate of mma.sync on an H100 (about 300 multiply-adds a
// cycle and quarter of an SM). 128 chunks of one document: 0.13 ms at least. Shared memory: 97.5 KB, of which k, A and v are in
// two stages; q and P arrive while V' is computed.

#include <algorithm>

#include "delta_tile.cuh"

namespace surogate::delta {
namespace {

constexpr int most_lanes = 8;  // pieces of a row that run at the same time

template <int Warps>
struct Stage {
    T k[chunk * wide], solve[chunk * narrow], v[chunk * (16 * Warps + 8)];
    float reads[chunk], left[chunk], beta[chunk];
};

struct ForOutputs {
    T q[chunk * wide], scores[chunk * narrow];
};

template <int Warps, bool Outputs>
constexpr int shared_bytes = 2 * sizeof(Stage<Warps>) + (Outputs ? sizeof(ForOutputs) : 0);

template <int Warps>
__device__ __forceinline__ void load_stage(Stage<Warps>& stage, const Inputs& inputs, const Prepared& prepared,
                                           const Sizes& sizes, int head, int slice, int at) {
    constexpr int threads = 32 * Warps, values = 16 * Warps;
    const int key_head = head / sizes.share, first = at * chunk;
    const int64_t of_keys = (static_cast<int64_t>(key_head) * sizes.tokens + first) * dim;
    const int64_t of_chunk = (static_cast<int64_t>(head) * sizes.chunks + at) * chunk * chunk;
    const int64_t of_tokens = static_cast<int64_t>(head) * sizes.tokens + first;
    copy_rows<dim, chunk, threads>(stage.k, wide, prepared.k + of_keys, dim);
    copy_rows<chunk, chunk, threads>(stage.solve, narrow, prepared.solve + of_chunk, chunk);
    copy_rows<values, chunk, threads>(stage.v, values + 8,
                                      inputs.qkv + first * sizes.qkv_row() + static_cast<int64_t>(2 * sizes.k_heads) * dim +
                                          head * dim + slice * values,
                                      sizes.qkv_row());
    for (int word = threadIdx.x; word < 3 * chunk / 4; word += threads) {
        const int which = word / (chunk / 4), i = word % (chunk / 4) * 4;
        float* to = which == 0 ? stage.reads : which == 1 ? stage.left : stage.beta;
        const float* from = which == 0 ? prepared.reads : which == 1 ? prepared.left : prepared.beta;
        copy_async(to + i, from + of_tokens + i, true);
    }
}

template <int Threads>
__device__ __forceinline__ void load_for_outputs(ForOutputs& to, const Prepared& prepared, const Sizes& sizes, int head,
                                                 int at) {
    const int64_t of_keys = (static_cast<int64_t>(head / sizes.share) * sizes.tokens + at * chunk) * dim;
    const int64_t of_chunk = (static_cast<int64_t>(head) * sizes.chunks + at) * chunk * chunk;
    copy_rows<dim, chunk, Threads>(to.q, wide, prepared.q + of_keys, dim);
    copy_rows<chunk, chunk, Threads>(to.scores, narrow, prepared.scores + of_chunk, chunk);
}

template <int Warps, bool Outputs, bool States>
__global__ void __launch_bounds__(32 * Warps)
    scan_kernel(Inputs inputs, Prepared prepared, Sizes sizes, T* out, T* states) {
    extern __shared__ __align__(16) char memory[];
    auto* stages = reinterpret_cast<Stage<Warps>*>(memory);
    auto& for_outputs = *reinterpret_cast<ForOutputs*>(stages + 2);
    constexpr int values = 16 * Warps, slices = dim / values;
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int head = blockIdx.x / slices, slice = blockIdx.x % slices;
    const int column = slice * values + 16 * warp + 2 * (lane % 4);  // of out, when it is transposed
    const int n_pieces = prepared.pieces[0];

    for (int piece = blockIdx.y; piece < n_pieces; piece += gridDim.y) {
        const int begin = prepared.pieces[1 + piece];
        const int end = piece + 1 < n_pieces ? prepared.pieces[2 + piece] : sizes.chunks - 1;  // the last chunk
        float state[dim / 8][4];
        uint32_t operand[dim / 16][4];
        clear(state);
#pragma unroll
        for (int k = 0; k < dim / 16; ++k) {
            operand[k][0] = operand[k][1] = operand[k][2] = operand[k][3] = 0u;
        }
        __syncthreads();  // nobody reads the stages of the last piece
        load_stage(stages[0], inputs, prepared, sizes, head, slice, begin);
        commit_copies();
        for (int at = begin; at <= end; ++at) {
            wait_copies<0>();
            __syncthreads();  // this stage is here, and nobody reads the other one
            const Stage<Warps>& stage = stages[(at - begin) % 2];
            const bool mine = at > begin || at == 0;  // the first chunk of a piece is the last one of the piece before
            if (Outputs && mine) {
                load_for_outputs<32 * Warps>(for_outputs, prepared, sizes, head, at);
            }
            commit_copies();
            if (at < end) {
                load_stage(stages[(at + 1 - begin) % 2], inputs, prepared, sizes, head, slice, at + 1);
            }
            commit_copies();
            if (States && mine) {
                const int64_t of_state = static_cast<int64_t>(at) * sizes.v_heads + head;
                store_state(states + (of_state * dim + slice * values + 16 * warp) * dim, operand);
            }

            uint32_t new_values[chunk / 16][4];  // V'^T
            float sums[chunk / 8][4];
            {
                clear(sums);  // U^T
#pragma unroll
                for (int k = 0; k < dim / 16; ++k) {
#pragma unroll
                    for (int n = 0; n < chunk / 16; ++n) {
                        uint32_t b[4];
                        load_b(b, stage.k, wide, 16 * n, 16 * k);
                        add_pair(sums[2 * n], sums[2 * n + 1], operand[k], b);
                    }
                }
                uint32_t rest[chunk / 16][4];  // R^T
#pragma unroll
                for (int n = 0; n < chunk / 16; ++n) {
                    uint32_t v[4];  // rows of values as the sums have them, of 8 tokens, then the next 8
                    load_a_transposed(v, stage.v, values + 8, 16 * warp, 16 * n);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int token = 16 * n + 8 * half + 2 * (lane % 4);
                        const float2 beta = *reinterpret_cast<const float2*>(stage.beta + token);
                        const float2 reads = *reinterpret_cast<const float2*>(stage.reads + token);
                        float(&u)[4] = sums[2 * n + half];
                        const float2 low = unpack(v[2 * half]), high = unpack(v[2 * half + 1]);
                        u[0] = beta.x * (low.x - reads.x * u[0]);
                        u[1] = beta.y * (low.y - reads.y * u[1]);
                        u[2] = beta.x * (high.x - reads.x * u[2]);
                        u[3] = beta.y * (high.y - reads.y * u[3]);
                    }
                    as_a(rest[n], sums[2 * n], sums[2 * n + 1]);
                }
                clear(sums);  // V'^T
#pragma unroll
                for (int k = 0; k < chunk / 16; ++k) {
#pragma unroll
                    for (int n = k; n < chunk / 16; ++n) {
                        uint32_t b[4];
                        load_b(b, stage.solve, narrow, 16 * n, 16 * k);
                        add_pair(sums[2 * n], sums[2 * n + 1], rest[k], b);
                    }
                }
            }
            if (at < end) {  // the state behind the chunk
                uint32_t kept[chunk / 16][4];
#pragma unroll
                for (int n = 0; n < chunk / 16; ++n) {
                    as_a(new_values[n], sums[2 * n], sums[2 * n + 1]);
                    float scaled[2][4];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float2 left = *reinterpret_cast<const float2*>(stage.left + 16 * n + 8 * half + 2 * (lane % 4));
                        const float(&v)[4] = sums[2 * n + half];
                        scaled[half][0] = left.x * v[0];
                        scaled[half][1] = left.y * v[1];
                        scaled[half][2] = left.x * v[2];
                        scaled[half][3] = left.y * v[3];
                    }
                    as_a(kept[n], scaled[0], scaled[1]);
                }
                const float carry = stage.reads[chunk - 1];
#pragma unroll
                for (int n = 0; n < dim / 16; ++n) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            state[2 * n + half][e] *= carry;
                        }
                    }
#pragma unroll
                    for (int k = 0; k < chunk / 16; ++k) {
                        uint32_t b[4];
                        load_b_transposed(b, stage.k, wide, 16 * n, 16 * k);
                        add_pair(state[2 * n], state[2 * n + 1], kept[k], b);
                    }
                }
            } else {
#pragma unroll
                for (int n = 0; n < chunk / 16; ++n) {
                    as_a(new_values[n], sums[2 * n], sums[2 * n + 1]);
                }
            }
            if constexpr (Outputs) {
                if (mine) {
                    wait_copies<1>();
                    __syncthreads();  // q and scores are here
                    clear(sums);      // O^T
#pragma unroll
                    for (int k = 0; k < dim / 16; ++k) {
#pragma unroll
                        for (int n = 0; n < chunk / 16; ++n) {
                            uint32_t b[4];
                            load_b(b, for_outputs.q, wide, 16 * n, 16 * k);
                            add_pair(sums[2 * n], sums[2 * n + 1], operand[k], b);
                        }
                    }
#pragma unroll
                    for (int n = 0; n < chunk / 8; ++n) {
                        const float2 reads = *reinterpret_cast<const float2*>(stage.reads + 8 * n + 2 * (lane % 4));
                        sums[n][0] *= reads.x;
                        sums[n][1] *= reads.y;
                        sums[n][2] *= reads.x;
                        sums[n][3] *= reads.y;
                    }
#pragma unroll
                    for (int k = 0; k < chunk / 16; ++k) {
#pragma unroll
                        for (int n = k; n < chunk / 16; ++n) {
                            uint32_t b[4];
                            load_b(b, for_outputs.scores, narrow, 16 * n, 16 * k);
                            add_pair(sums[2 * n], sums[2 * n + 1], new_values[k], b);
                        }
                    }
                    T* to = out + static_cast<int64_t>(at * chunk + lane / 4) * sizes.values_row() + head * dim + column;
#pragma unroll
                    for (int n = 0; n < chunk / 8; ++n) {
                        T* token = to + 8 * n * sizes.values_row();
                        *reinterpret_cast<uint32_t*>(token) = transposed(pack(sums[n][0], sums[n][1]));
                        *reinterpret_cast<uint32_t*>(token + 8) = transposed(pack(sums[n][2], sums[n][3]));
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < dim / 16; ++k) {
                as_a(operand[k], state[2 * k], state[2 * k + 1]);
            }
        }
    }
}

template <int Warps, bool Outputs, bool States>
void launch(const Inputs& inputs, const Prepared& prepared, const Sizes& sizes, T* out, T* states, cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule";
    constexpr int bytes = shared_bytes<Warps, Outputs>;
    const auto kernel = scan_kernel<Warps, Outputs, States>;
    allow_shared_memory(kernel, bytes, op);
    const dim3 grid(sizes.v_heads * dim / (16 * Warps), std::min(sizes.chunks, most_lanes));
    kernel<<<grid, 32 * Warps, bytes, stream>>>(inputs, prepared, sizes, out, states);
    check_launch(op);
}

}  // namespace

void scan(const Inputs& inputs, const Prepared& prepared, const Sizes& sizes, T* out, T* states, cudaStream_t stream) {
    if (out && states) {
        launch<4, true, true>(inputs, prepared, sizes, out, states, stream);
    } else if (out) {
        launch<4, true, false>(inputs, prepared, sizes, out, states, stream);
    } else {
        launch<4, false, true>(inputs, prepared, sizes, out, states, stream);
    }
}

}  // namespace surogate::delta

namespace surogate {

using namespace delta;

int64_t delta_workspace(int64_t tokens, int64_t k_heads, int64_t v_heads) {
    const Sizes sizes = checked_sizes(tokens, k_heads, v_heads, "gated_delta_rule");
    Division division(nullptr);
    prepared_in(division, sizes);
    return division.bytes();
}

void gated_delta_rule(const void* qkv, const void* ba, const void* a_log, const void* dt_bias, const void* positions,
                      void* out, void* states, void* workspace, int64_t tokens, int64_t k_heads, int64_t v_heads,
                      cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule";
    const Sizes sizes = checked_sizes(tokens, k_heads, v_heads, op);
    const Inputs inputs = inputs_of(qkv, ba, a_log, dt_bias, positions, op);
    SUROGATE_REQUIRE(out || states, op, "out and states are null pointers");
    SUROGATE_REQUIRE(is_aligned(out, 16) && is_aligned(states, 16), op, "out and states must be aligned to 16 bytes");
    check_pointer(workspace, op, "workspace", 256);
    Division division(workspace);
    const Prepared prepared = prepared_in(division, sizes);
    prepare(inputs, prepared, sizes, stream);
    scan(inputs, prepared, sizes, static_cast<T*>(out), static_cast<T*>(states), stream);
}

}  // namespace surogate
