// The gradient of the state of the gated delta rule from chunk to chunk, backwards (delta.h).
//
// As in delta_scan.cu, a warp has 16 columns of values, and their rows of dS^T in its registers. Of a chunk, with dS behind it:
//   dV' = P^T dO + left K dS     dR = A^T dV'     dU = -beta reads dR     dS <- carry dS + Q^T (reads dO) + K^T dU
// Writes dR [T, Hv D], and dS^T behind each chunk [T / 64, Hv, values, keys], both bf16.
//
// A piece ends with the chunk in which the next document begins. Behind that chunk its document has no state, so dS is zero
// there; dR and dS of that chunk are those of the next piece, because left is 0 for the tokens of this one.
//
// Products of a chunk and warp: 232 of 16 x 8 x 16, as in the forward pass.

#include <algorithm>

#include "delta_bwd.cuh"

namespace surogate::delta {
namespace {

constexpr int warps = 4, threads = 32 * warps, values = 16 * warps, slices = dim / values;
constexpr int most_lanes = 8;  // pieces of a row that run at the same time

struct Stage {
    T k[chunk * wide], scores[chunk * narrow], d[chunk * (values + 8)];
    float reads[chunk], left[chunk], beta[chunk];
};

struct Later {
    T q[chunk * wide], solve[chunk * narrow];
};

__device__ __forceinline__ void load_stage(Stage& stage, const T* dout, const Prepared& prepared, const Sizes& sizes,
                                           int head, int slice, int at) {
    const int first = at * chunk;
    const int64_t of_keys = (static_cast<int64_t>(head / sizes.share) * sizes.tokens + first) * dim;
    const int64_t of_chunk = (static_cast<int64_t>(head) * sizes.chunks + at) * chunk * chunk;
    const int64_t of_tokens = static_cast<int64_t>(head) * sizes.tokens + first;
    copy_rows<dim, chunk, threads>(stage.k, wide, prepared.k + of_keys, dim);
    copy_rows<chunk, chunk, threads>(stage.scores, narrow, prepared.scores + of_chunk, chunk);
    copy_rows<values, chunk, threads>(stage.d, values + 8, dout + first * sizes.values_row() + head * dim + slice * values,
                                      sizes.values_row());
    for (int word = threadIdx.x; word < 3 * chunk / 4; word += threads) {
        const int which = word / (chunk / 4), i = word % (chunk / 4) * 4;
        float* to = which == 0 ? stage.reads : which == 1 ? stage.left : stage.beta;
        const float* from = which == 0 ? prepared.reads : which == 1 ? prepared.left : prepared.beta;
        copy_async(to + i, from + of_tokens + i, true);
    }
}

__device__ __forceinline__ void load_later(Later& to, const Prepared& prepared, const Sizes& sizes, int head, int at) {
    const int64_t of_keys = (static_cast<int64_t>(head / sizes.share) * sizes.tokens + at * chunk) * dim;
    const int64_t of_chunk = (static_cast<int64_t>(head) * sizes.chunks + at) * chunk * chunk;
    copy_rows<dim, chunk, threads>(to.q, wide, prepared.q + of_keys, dim);
    copy_rows<chunk, chunk, threads>(to.solve, narrow, prepared.solve + of_chunk, chunk);
}

// Multiplies the terms of an operand A, which are tokens from `token`, by factors.
__device__ __forceinline__ void scale_terms(uint32_t (&a)[4], const float* factors, int token) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 factor = *reinterpret_cast<const float2*>(factors + token + 8 * half + 2 * (threadIdx.x % 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 x = unpack(a[2 * half + i]);
            a[2 * half + i] = pack(x.x * factor.x, x.y * factor.y);
        }
    }
}

__global__ void __launch_bounds__(threads)
    scan_bwd_kernel(const T* dout, Prepared prepared, Sizes sizes, T* d_rest, T* d_states) {
    extern __shared__ __align__(16) char memory[];
    auto* stages = reinterpret_cast<Stage*>(memory);
    auto& later = *reinterpret_cast<Later*>(stages + 2);
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int head = blockIdx.x / slices, slice = blockIdx.x % slices;
    const int n_pieces = prepared.pieces[0];

    for (int piece = blockIdx.y; piece < n_pieces; piece += gridDim.y) {
        const int first = prepared.pieces[1 + piece];
        const bool last_piece = piece + 1 == n_pieces;
        const int begin = last_piece ? sizes.chunks - 1 : prepared.pieces[2 + piece];
        float state[dim / 8][4];
        clear(state);
        __syncthreads();  // nobody reads the stages of the last piece
        load_stage(stages[0], dout, prepared, sizes, head, slice, begin);
        commit_copies();
        for (int at = begin; at >= first; --at) {
            wait_copies<0>();
            __syncthreads();  // this stage is here, and nobody reads the other one
            const Stage& stage = stages[(begin - at) % 2];
            load_later(later, prepared, sizes, head, at);
            commit_copies();
            if (at > first) {
                load_stage(stages[(begin - at + 1) % 2], dout, prepared, sizes, head, slice, at - 1);
            }
            commit_copies();
            const bool mine = at < begin || last_piece;

            uint32_t operand[chunk / 16][4];
            float sums[chunk / 8][4];
            clear(sums);  // dV'^T
            {
                uint32_t behind[dim / 16][4];
#pragma unroll
                for (int k = 0; k < dim / 16; ++k) {
                    as_a(behind[k], state[2 * k], state[2 * k + 1]);
#pragma unroll
                    for (int n = 0; n < chunk / 16; ++n) {
                        uint32_t b[4];
                        load_b(b, stage.k, wide, 16 * n, 16 * k);
                        add_pair(sums[2 * n], sums[2 * n + 1], behind[k], b);
                    }
                }
                if (mine) {
                    const int64_t of_state = static_cast<int64_t>(at) * sizes.v_heads + head;
                    store_state(d_states + (of_state * dim + slice * values + 16 * warp) * dim, behind);
                }
            }
#pragma unroll
            for (int n = 0; n < chunk / 8; ++n) {
                const float2 left = *reinterpret_cast<const float2*>(stage.left + 8 * n + 2 * (lane % 4));
                sums[n][0] *= left.x;
                sums[n][1] *= left.y;
                sums[n][2] *= left.x;
                sums[n][3] *= left.y;
            }
#pragma unroll
            for (int k = 0; k < chunk / 16; ++k) {  // tokens i, which read those up to i
                uint32_t a[4];
                load_a_transposed(a, stage.d, values + 8, 16 * warp, 16 * k);
#pragma unroll
                for (int n = 0; n <= k; ++n) {
                    uint32_t b[4];
                    load_b_transposed(b, stage.scores, narrow, 16 * n, 16 * k);
                    add_pair(sums[2 * n], sums[2 * n + 1], a, b);
                }
            }
#pragma unroll
            for (int n = 0; n < chunk / 16; ++n) {
                as_a(operand[n], sums[2 * n], sums[2 * n + 1]);
            }
            wait_copies<1>();
            __syncthreads();  // q and solve are here
            clear(sums);      // dR^T
#pragma unroll
            for (int k = 0; k < chunk / 16; ++k) {
#pragma unroll
                for (int n = 0; n <= k; ++n) {
                    uint32_t b[4];
                    load_b_transposed(b, later.solve, narrow, 16 * n, 16 * k);
                    add_pair(sums[2 * n], sums[2 * n + 1], operand[k], b);
                }
            }
            if (mine) {
                T* to = d_rest + static_cast<int64_t>(at * chunk + lane / 4) * sizes.values_row() + head * dim +
                        slice * values + 16 * warp + 2 * (lane % 4);
#pragma unroll
                for (int n = 0; n < chunk / 8; ++n) {
                    T* token = to + 8 * n * sizes.values_row();
                    *reinterpret_cast<uint32_t*>(token) = transposed(pack(sums[n][0], sums[n][1]));
                    *reinterpret_cast<uint32_t*>(token + 8) = transposed(pack(sums[n][2], sums[n][3]));
                }
            }
            if (at > first) {  // dS in front of the chunk
                const float carry = stage.reads[chunk - 1];
#pragma unroll
                for (int n = 0; n < dim / 8; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        state[n][e] *= carry;
                    }
                }
#pragma unroll
                for (int k = 0; k < chunk / 16; ++k) {
                    uint32_t read[4], d_read[4];
                    load_a_transposed(read, stage.d, values + 8, 16 * warp, 16 * k);
                    scale_terms(read, stage.reads, 16 * k);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int token = 16 * k + 8 * half + 2 * (lane % 4);
                        const float2 reads = *reinterpret_cast<const float2*>(stage.reads + token);
                        const float2 beta = *reinterpret_cast<const float2*>(stage.beta + token);
                        float(&r)[4] = sums[2 * k + half];
                        r[0] *= -beta.x * reads.x;
                        r[1] *= -beta.y * reads.y;
                        r[2] *= -beta.x * reads.x;
                        r[3] *= -beta.y * reads.y;
                    }
                    as_a(d_read, sums[2 * k], sums[2 * k + 1]);
#pragma unroll
                    for (int n = 0; n < dim / 16; ++n) {
                        uint32_t b[4];
                        load_b_transposed(b, later.q, wide, 16 * n, 16 * k);
                        add_pair(state[2 * n], state[2 * n + 1], read, b);
                        load_b_transposed(b, stage.k, wide, 16 * n, 16 * k);
                        add_pair(state[2 * n], state[2 * n + 1], d_read, b);
                    }
                }
            }
        }
    }
}

}  // namespace

void scan_bwd(const T* dout, const Prepared& prepared, const Sizes& sizes, T* d_rest, T* d_states, cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule_bwd";
    constexpr int bytes = 2 * sizeof(Stage) + sizeof(Later);
    allow_shared_memory(scan_bwd_kernel, bytes, op);
    const dim3 grid(sizes.v_heads * slices, std::min(sizes.chunks, most_lanes));
    scan_bwd_kernel<<<grid, threads, bytes, stream>>>(dout, prepared, sizes, d_rest, d_states);
    check_launch(op);
}

}  // namespace surogate::delta
