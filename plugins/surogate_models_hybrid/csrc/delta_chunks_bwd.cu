// Gradients of the gated delta rule that a chunk computes by itself (delta.h): of q, k, v, b and a.
//
// With S in front of the chunk, dS behind it and dR (delta_scan_bwd.cu), U = K S, R = beta (V - reads U) and V' = A R anew:
//   dV = beta dR     dbeta = rowsum(dR * (V - reads U)) + rowsum(dL * K K^T * D)
//   dP = dO V'^T     dL = -dR V'^T, strictly lower: L is what A inverts, and dA = dV' R^T, so -A^T dA A^T = -dR V'^T
//   dQ = reads (dO S^T) + (dP * D) K
//   dK = -beta reads (dR S^T) + left (V' dS^T) + (dP * D)^T Q + (E + E^T) K     E = beta dL * D
//   dreads = rowsum(Q * dO S^T) - beta rowsum(U * dR)     dleft = rowsum(K * V' dS^T)     dcarry = sum(S * dS)
//   X = dP * P + dL * L, strictly lower     dG = reads dreads + rowsum(X) - colsum(X) - left dleft, and of the last token instead
//   of its left dleft the sum of the others' + carry dcarry     dg = reversed cumsum(dG), of the tokens of the document
// dQ and dK are summed over the value heads of the key head in registers, in order, then go through the norms.
//
// Grid: as many blocks as the device has multiprocessors, which take the chunks of key heads in turn. Sixteen warps: four times
// 16 tokens, of quarters of the columns. The values are computed in slices, of which S, dS, v, dO and dR arrive while the slice
// before is computed. All sums over values are additions to registers, so a slice may be as narrow as the shared memory asks:
// 64 values take 201 KiB, 32 in two stages 139 and in one 97, for devices whose blocks have 227, 163 and 99.
//
// What takes time is to read operands from shared memory: a load of 16 x 16 for each or two of three products of 16 x 8 x 16,
// four cycles of the multiprocessor each. So products with the same operand are computed together, and tiles of 16 x 16 above
// the diagonal are left out; rows are given to warps so that the quarters of a multiprocessor have equal shares of the others.
// Registers are full, and words on the stack are worse than instructions: shared memory leaves no L1 cache for them.
//
// Products of a chunk and value head: 6.4M multiply-adds. 8,192 tokens and 32 heads: 52 GFLOP, 0.13 ms at 400 TFLOP/s. Bytes:
// S and dS 32 KiB a token, read once; qkv, dO and dR 32, dqkv 16: 0.14 ms at 4.8 TB/s. Operands: 8,700 cycles, 0.16 ms;
// all that passes through shared memory 16,000. On an H200 (2026-11-30) it takes 27,900 cycles, 0.50 ms.

#include <algorithm>

#include "delta_chunk_parts.cuh"

namespace surogate::delta {
namespace {

// Leaves what finish_head() takes of the decay of token i.
__device__ __forceinline__ void store_decays(Head& head, int i, const Operands& from, int first, int index) {
    const T* of_token = from.inputs.ba + static_cast<int64_t>(first + i) * 2 * from.sizes.v_heads;
    const float a = __bfloat162float(of_token[from.sizes.v_heads + index]);
    const Decay decay = decay_of(a, from.inputs.a_log[index], from.inputs.dt_bias[index]);
    head.g[i] = decay.g;
    head.slope[i] = decay.rate * decay.slope;
}

// The gradients of b and a of a value head from the sums that all warps have left. A warp calls it.
template <class Memory>
__device__ __forceinline__ void finish_head(const Memory& shared, const Head& head, const Operands& from,
                                            const Gradients& gradients, int at, int index) {
    const int lane = threadIdx.x % 32, first = at * chunk;
    const Sizes& sizes = from.sizes;
    float gradient[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = half * 32 + lane;
        gradient[half] = sum_of_parts(shared.of_parts[d_decay], i);
#pragma unroll
        for (int rows = 0; rows < 4; ++rows) {
            gradient[half] -= rows >= i / 16 ? shared.of_columns[rows][i] : 0.0f;  // those above the diagonal are not computed
        }
    }
    const float of_last = warp_sum(lane < warps ? shared.of_last[lane] : 0.0f);
    if (lane == 31) {
        gradient[1] += of_last;
    }
    float behind = 0.0f, of_a_log = 0.0f, of_dt_bias = 0.0f;
#pragma unroll
    for (int half = 1; half >= 0; --half) {
        const int i = half * 32 + lane, document = shared.document[i];
        float sum = gradient[half];
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {  // of the tokens of the document alone
            const float other = __shfl_down_sync(full_warp, sum, offset);
            const int of_other = __shfl_down_sync(full_warp, document, offset);
            sum += lane + offset < 32 && document == of_other ? other : 0.0f;
        }
        if (half == 0 && document == shared.document[32]) {
            sum += behind;
        }
        behind = __shfl_sync(full_warp, sum, 0);
        const float of_a = sum * head.slope[i], beta = head.beta[i];
        const float of_b = sum_of_parts(shared.of_parts[d_beta], i) * beta * (1.0f - beta);
        T* to = gradients.ba + static_cast<int64_t>(first + i) * 2 * sizes.v_heads + index;
        to[0] = __float2bfloat16_rn(of_b);
        to[sizes.v_heads] = __float2bfloat16_rn(of_a);
        of_a_log += sum * head.g[i];
        of_dt_bias += of_a;
    }
    of_a_log = warp_sum(of_a_log);
    of_dt_bias = warp_sum(of_dt_bias);
    if (lane == 0) {
        float* partial = gradients.partial + (static_cast<int64_t>(at) * sizes.v_heads + index) * 2;
        partial[0] = of_a_log;
        partial[1] = of_dt_bias;
    }
}

// The norms: y = x r with r = 1 / sqrt(sum x^2 + 1e-6), so dx = r (dy - y sum(y dy)). Of q, y and dy have the scale too. Leaves
// the gradients in place of q and k. All threads of the block call it.
template <class Memory>
__device__ __forceinline__ void differentiate_norms(const Lane& my, Memory& shared, const float (&dq)[keys / 8][4],
                                                    const float (&dk)[keys / 8][4], float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
            const int column = keys * my.part + 8 * n + my.column;
            const float2 q = pair_of(shared.q, wide, my.row_of[i], column), k = pair_of(shared.k, wide, my.row_of[i], column);
            of_q = add_products(of_q, q, dq[n][2 * i], dq[n][2 * i + 1]);
            of_k = add_products(of_k, k, dk[n][2 * i], dk[n][2 * i + 1]);
        }
        store_row_sum(shared.norms[0][my.part], my.row_of[i], of_q);
        store_row_sum(shared.norms[1][my.part], my.row_of[i], of_k);
    }
    __syncthreads();  // the sums are complete, and nobody multiplies q and k
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = my.row_of[i];
        const float of_q = sum_of_parts(shared.norms[0], row) / scale, of_k = sum_of_parts(shared.norms[1], row);
        const float q_factor = shared.factors[0][row], k_factor = shared.factors[1][row];
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
            const int column = keys * my.part + 8 * n + my.column;
            const float2 q = pair_of(shared.q, wide, row, column), k = pair_of(shared.k, wide, row, column);
            // q is y times the scale: y sum(y dy scale) is q sum(q dq) / scale
            store_pair(shared.q, wide, row, column, q_factor * (dq[n][2 * i] * scale - q.x * of_q),
                       q_factor * (dq[n][2 * i + 1] * scale - q.y * of_q));
            store_pair(shared.k, wide, row, column, k_factor * (dk[n][2 * i] - k.x * of_k),
                       k_factor * (dk[n][2 * i + 1] - k.y * of_k));
        }
    }
    __syncthreads();
}

template <int Values, int Stages>
__global__ void __launch_bounds__(threads, 1) chunks_bwd_kernel(Operands from, Gradients gradients) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Shared<Values, Stages>*>(memory);
    constexpr int slices = dim / Values;
    const Sizes& sizes = from.sizes;
    const int64_t row = sizes.qkv_row(), of_keys = static_cast<int64_t>(sizes.k_heads) * dim;
    const float scale = rsqrtf(static_cast<float>(dim));

    Place place = Place::of_item(static_cast<int>(blockIdx.x), sizes);
    int head_at = 0;
    if constexpr (Stages == 2) {
        load_stage<Values, slices>(shared.stages[0], shared.heads[0], from, place);
        commit_copies();
    }
#pragma unroll 1
    while (place.exists(sizes)) {
        const int first = place.at * chunk;
        Rows rows;
        rows.load(from, place);
        norm_rows(rows.words[0], shared.q, shared.factors[0], scale);
        norm_rows(rows.words[1], shared.k, shared.factors[1], 1.0f);
        if (threadIdx.x < 32) {
            count_documents(shared.document, rows.positions);
        }
        float dq[keys / 8][4], dk[keys / 8][4];
        clear(dq);
        clear(dk);
#pragma unroll 1
        for (place.of_share = 0; place.of_share < sizes.share; ++place.of_share) {
            const int index = place.key_head * sizes.share + place.of_share;
            Head& head = shared.heads[head_at];
            float of_beta[2] = {}, of_decay[2] = {}, of_last = 0.0f;
            float d_scores[tokens / 8][4], d_lower[tokens / 8][4];
            clear(d_scores);
            clear(d_lower);
#pragma unroll 1
            for (place.slice = 0; place.slice < slices; ++place.slice) {
                Stage<Values>& stage = shared.stages[place.slice % Stages];
                if constexpr (Stages == 1) {
                    __syncthreads();  // nobody reads the last slice, or what is of the last head
                    load_stage<Values, slices>(stage, head, from, place);
                    commit_copies();
                }
                wait_copies<0>();
                __syncthreads();  // this slice is here, and nobody reads the last one
                if constexpr (Stages == 2) {
                    if (const Place next = place.next<slices>(sizes); next.exists(sizes)) {
                        load_stage<Values, slices>(shared.stages[1 - place.slice % 2], shared.heads[1 - head_at], from, next);
                    }
                    commit_copies();
                }
                const Lane my;
                compute_rest(my, stage, head, shared.k, of_beta, of_decay);
                add_through_state(my, stage, head, shared.q, dq, dk, of_decay);
                __syncthreads();  // R is complete
                compute_new_values(my, stage, head, shared.new_values);
                of_last += head.reads[chunk - 1] * carried(stage);
                write_dv(stage, head, gradients.qkv + first * row + 2 * of_keys + index * dim + place.slice * Values, row);
                __syncthreads();  // V' is complete
                add_scores(my, stage, shared.new_values, d_scores, d_lower);
                add_through_d_state(my, stage, head, shared.new_values, shared.k, dk, of_decay, of_last);
            }

            const Lane my;
            if (my.warp >= warps - 2) {  // which have no pairs to mask
                store_decays(head, my.lane + 32 * (my.warp - warps + 2), from, first, index);
            }
            mask_scores(my, shared, head, d_scores, d_lower, of_beta, of_decay);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                store_row_sum(shared.of_parts[d_beta][my.part], my.row_of[i], of_beta[i]);
                store_row_sum(shared.of_parts[d_decay][my.part], my.row_of[i], of_decay[i]);
            }
            of_last = warp_sum(of_last);
            if (my.lane == 0) {
                shared.of_last[my.warp] = of_last;
            }
            __syncthreads();  // dP * D, E and the sums are complete
            add_inside_of_chunk(my, shared, head, dq, dk);
            if (my.warp == 0) {
                finish_head(shared, head, from, gradients, place.at, index);
            }
            head_at = (head_at + 1) % Stages;
        }

        T* to = gradients.qkv + first * row + place.key_head * dim;
        place = place.next_item(sizes);
        differentiate_norms(Lane(), shared, dq, dk, scale);
        // a lane writes what it will norm next
        for_rows([&](int, int r, int c) {
            *reinterpret_cast<uint2*>(to + r * row + c) = *reinterpret_cast<const uint2*>(shared.q + r * wide + c);
            *reinterpret_cast<uint2*>(to + r * row + of_keys + c) = *reinterpret_cast<const uint2*>(shared.k + r * wide + c);
        });
    }
}

template <int Values, int Stages>
void launch(const Operands& from, const Gradients& gradients, int multiprocessors, cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule_bwd";
    constexpr int bytes = sizeof(Shared<Values, Stages>);
    const auto kernel = chunks_bwd_kernel<Values, Stages>;
    allow_shared_memory(kernel, bytes, op);
    kernel<<<std::min(multiprocessors, from.sizes.chunks * from.sizes.k_heads), threads, bytes, stream>>>(from, gradients);
    check_launch(op);
}

}  // namespace

void chunks_bwd(const T* dout, const Inputs& inputs, const Prepared& prepared, const Sizes& sizes, const T* states,
                const T* d_rest, const T* d_states, const Gradients& gradients, int64_t shared_memory, cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule_bwd";
    int device = 0, multiprocessors = 0, most = 0;
    check_cuda(cudaGetDevice(&device), op);
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), op);
    check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op);
    const auto bytes = static_cast<size_t>(shared_memory ? std::min<int64_t>(shared_memory, most) : most);
    const Operands from{dout, inputs, prepared, sizes, states, d_rest, d_states};
    if (bytes >= sizeof(Shared<64, 2>)) {
        launch<64, 2>(from, gradients, multiprocessors, stream);
    } else if (bytes >= sizeof(Shared<32, 2>)) {
        launch<32, 2>(from, gradients, multiprocessors, stream);
    } else {
        SUROGATE_REQUIRE(bytes >= sizeof(Shared<32, 1>), op,
                         "a block takes " + std::to_string(sizeof(Shared<32, 1>)) + " bytes of shared memory at least, got " +
                             std::to_string(bytes));
        launch<32, 1>(from, gradients, multiprocessors, stream);
    }
}

}  // namespace surogate::delta
