// Gradients of the gated delta rule that a chunk computes by itself (delta.h): of q, k, v, b and a.
//
// With S in front of the chunk, dS behind it and dR (delta_scan_bwd.cu), U = K S, R = beta (V - reads U) and V' = A R anew:
//   dV = beta dR     dbeta = rowsum(dR * (V - reads U)) + rowsum(dL * K K^T * D)
//   dP = dO V'^T     dL = -dR V'^T, strictly lower: L is what A inverts, and dA = dV' R^T, so -A^T dA A^T = -dR V'^T
//   dQ = reads (dO S^T) + (dP * D) K
//   dK = -beta reads (dR S^T) + left (V' dS^T) + (dP * D)^T Q + (E + E^T) K     E = beta dL * D
//   dreads = rowsum(Q * dO S^T) - beta rowsum(K * dR S^T)     dleft = rowsum(K * V' dS^T)     dcarry = sum(S * dS)
//   X = dP * P + dL * L     dG = reads dreads + rowsum(X) - colsum(X) - left dleft, and of the last token also
//   sum(left dleft) + carry dcarry     dg = reversed cumsum(dG)
// dQ and dK are summed over the value heads of the key head in registers, in order, then go through the norms.
//
// Grid: a block computes a chunk of a key head. Sixteen warps: four times 16 tokens, of quarters of the columns. Shared memory:
// 146 KB, of which S and then dS, v and then R and then V', A and then dP * D share places.
//
// Products of a chunk and value head: 7.3M multiply-adds. 8,192 tokens and 32 heads: 60 GFLOP, 0.15 ms at 400 TFLOP/s. Bytes:
// S and dS 32 KiB a token, read once; qkv, dO and dR 32, dqkv 16: 0.14 ms at 4.8 TB/s.

#include "delta_bwd.cuh"

namespace surogate::delta {
namespace {

constexpr int parts = 4, warps = 4 * parts, threads = 32 * warps;  // parts: of the columns
constexpr int wide_pairs = dim / parts / 16, narrow_pairs = chunk / parts / 16;  // of 16 columns that a warp has

struct Shared {
    T q[chunk * wide], k[chunk * wide], d[chunk * wide], d_rest[chunk * wide];
    T values[chunk * wide];       // v, then R, then V'
    T state[dim * wide];          // S^T, then dS^T
    T solve[chunk * narrow];      // A, then dP * D
    T d_system[chunk * narrow];   // E
    float decay[chunk], reads[chunk], left[chunk], beta[chunk], a[chunk];
    float of_parts[4][parts][chunk];  // sums over rows: of dbeta, dreads, dleft, X
    float of_columns[4][chunk];       // sums of X over the rows of a warp
    float carried[warps];
    float norms[2][parts][chunk];     // of the gradients of q and k
    float factors[2][chunk];          // of q and k, 1 / sqrt(sum x^2 + 1e-6)
    int document[chunk];
};

enum Row { d_beta, d_reads, d_left, d_decay };

__device__ __forceinline__ float2 pair_of(const T* tile, int row, int column) {
    return unpack(*reinterpret_cast<const uint32_t*>(tile + row * wide + column));
}

// Adds over the four lanes that share a row, and stores the sum of this part of the columns.
__device__ __forceinline__ void store_row_sum(float (&of_part)[chunk], int row, float sum) {
    sum = warp_sum<4>(sum);
    if (threadIdx.x % 4 == 0) {
        of_part[row] = sum;
    }
}

__device__ __forceinline__ float sum_of_parts(const float (&of_parts)[parts][chunk], int row) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
        sum += of_parts[part][row];
    }
    return sum;
}

// Norms 64 rows, as prepare.cu does, in their own order.
__device__ __forceinline__ void norm_rows(const T* from, int64_t from_row, T* tile, float (&factors)[chunk], float scale) {
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    uint2 words[chunk / warps];
#pragma unroll
    for (int i = 0; i < chunk / warps; ++i) {
        words[i] = *reinterpret_cast<const uint2*>(from + (warp + i * warps) * from_row + 4 * lane);
    }
#pragma unroll
    for (int i = 0; i < chunk / warps; ++i) {
        const int r = warp + i * warps;
        const float2 a = unpack(words[i].x), b = unpack(words[i].y);
        const float root = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) + 1e-6f), factor = root * scale;
        *reinterpret_cast<uint2*>(tile + r * wide + 4 * lane) = {pack(a.x * factor, a.y * factor),
                                                                 pack(b.x * factor, b.y * factor)};
        if (lane == 0) {
            factors[r] = root;
        }
    }
}

// sums += a [16 rows, Terms] b^T, of tiles [rows, Terms] and [columns, Terms].
template <int Terms, int Pairs>
__device__ __forceinline__ void add_rows(float (&sums)[2 * Pairs][4], const T* a_tile, int a_row, int rows, const T* b_tile,
                                         int b_row, int columns) {
#pragma unroll
    for (int k = 0; k < Terms; k += 16) {
        uint32_t a[4], b[Pairs][4];
        load_a(a, a_tile, a_row, rows, k);
#pragma unroll
        for (int n = 0; n < Pairs; ++n) {
            load_b(b[n], b_tile, b_row, columns + 16 * n, k);
        }
#pragma unroll
        for (int n = 0; n < Pairs; ++n) {
            add_pair(sums[2 * n], sums[2 * n + 1], a, b[n]);
        }
    }
}

// sums += a [16 rows, Terms] b, of tiles [rows, Terms] and [Terms, columns].
template <int Terms, int Pairs>
__device__ __forceinline__ void add_columns(float (&sums)[2 * Pairs][4], const T* a_tile, int a_row, int rows,
                                            const T* b_tile, int b_row, int columns, int terms = Terms) {
#pragma unroll
    for (int k = 0; k < Terms; k += 16) {
        if (k < terms) {
            uint32_t a[4], b[Pairs][4];
            load_a(a, a_tile, a_row, rows, k);
#pragma unroll
            for (int n = 0; n < Pairs; ++n) {
                load_b_transposed(b[n], b_tile, b_row, columns + 16 * n, k);
            }
#pragma unroll
            for (int n = 0; n < Pairs; ++n) {
                add_pair(sums[2 * n], sums[2 * n + 1], a, b[n]);
            }
        }
    }
}

__global__ void __launch_bounds__(threads, 1)
    chunks_bwd_kernel(const T* dout, Inputs inputs, Prepared prepared, Sizes sizes, const T* states, const T* d_rest,
                      const T* d_states, Gradients gradients) {
    extern __shared__ __align__(16) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int rows = 16 * (warp % 4), part = warp / 4;
    const int wide_begin = dim / parts * part, narrow_begin = chunk / parts * part;
    const int at = blockIdx.x, key_head = blockIdx.y, first = at * chunk;
    const int row_of[2] = {rows + lane / 4, rows + lane / 4 + 8}, column_of = 2 * (lane % 4);
    const T* queries = inputs.qkv + first * sizes.qkv_row() + key_head * dim;

    norm_rows(queries, sizes.qkv_row(), shared.q, shared.factors[0], rsqrtf(static_cast<float>(dim)));
    norm_rows(queries + static_cast<int64_t>(sizes.k_heads) * dim, sizes.qkv_row(), shared.k, shared.factors[1], 1.0f);
    if (warp == 0) {
        count_documents(shared.document, inputs.positions + first);
    }
    __syncthreads();

    float keys_keys[2 * narrow_pairs][4], queries_keys[2 * narrow_pairs][4];
    clear(keys_keys);
    clear(queries_keys);
    add_rows<dim, narrow_pairs>(keys_keys, shared.k, wide, rows, shared.k, wide, narrow_begin);
    add_rows<dim, narrow_pairs>(queries_keys, shared.q, wide, rows, shared.k, wide, narrow_begin);

    float dq[2 * wide_pairs][4], dk[2 * wide_pairs][4];
    clear(dq);
    clear(dk);
    for (int of_share = 0; of_share < sizes.share; ++of_share) {
        const int head = key_head * sizes.share + of_share;
        const int64_t of_values = first * sizes.values_row() + head * dim;
        const int64_t of_chunk = static_cast<int64_t>(head) * sizes.chunks + at;
        const int64_t of_state = (static_cast<int64_t>(at) * sizes.v_heads + head) * dim * dim;
        const int64_t of_tokens = static_cast<int64_t>(head) * sizes.tokens + first;
        const int64_t value_columns = static_cast<int64_t>(2 * sizes.k_heads + head) * dim;
        __syncthreads();  // nobody reads what is of the last head
        copy_rows<dim, dim, threads>(shared.state, wide, states + of_state, dim);
        copy_rows<dim, chunk, threads>(shared.d, wide, dout + of_values, sizes.values_row());
        copy_rows<dim, chunk, threads>(shared.d_rest, wide, d_rest + of_values, sizes.values_row());
        copy_rows<dim, chunk, threads>(shared.values, wide, inputs.qkv + first * sizes.qkv_row() + value_columns,
                                       sizes.qkv_row());
        copy_rows<chunk, chunk, threads>(shared.solve, narrow, prepared.solve + of_chunk * chunk * chunk, chunk);
        commit_copies();
        if (threadIdx.x < chunk) {
            const int i = threadIdx.x;
            shared.decay[i] = prepared.decay[of_tokens + i];
            shared.reads[i] = prepared.reads[of_tokens + i];
            shared.left[i] = prepared.left[of_tokens + i];
            shared.beta[i] = prepared.beta[of_tokens + i];
            shared.a[i] = __bfloat162float(
                inputs.ba[static_cast<int64_t>(first + i) * 2 * sizes.v_heads + sizes.v_heads + head]);
        }
        constexpr int words = dim * dim / 8 / threads;
        uint4 behind[words];  // dS, of which the sum over S * dS is taken while S is here
#pragma unroll
        for (int i = 0; i < words; ++i) {
            behind[i] = *reinterpret_cast<const uint4*>(d_states + of_state + (threadIdx.x + i * threads) * 8);
        }
        wait_copies<0>();
        __syncthreads();

        float carried = 0.0f;
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int word = static_cast<int>(threadIdx.x) + i * threads, r = word / (dim / 8), c = word % (dim / 8) * 8;
            const uint4 s = *reinterpret_cast<const uint4*>(shared.state + r * wide + c);
            const uint32_t of_s[4] = {s.x, s.y, s.z, s.w};
            const uint32_t of_ds[4] = {behind[i].x, behind[i].y, behind[i].z, behind[i].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float2 x = unpack(of_s[w]), y = unpack(of_ds[w]);
                carried += x.x * y.x + x.y * y.y;
            }
        }
        carried = warp_sum(carried);
        if (lane == 0) {
            shared.carried[warp] = carried;
        }

        float sums[2 * wide_pairs][4];
        clear(sums);  // U
        add_rows<dim, wide_pairs>(sums, shared.k, wide, rows, shared.state, wide, wide_begin);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row_of[i];
            const float beta = shared.beta[row], reads = shared.reads[row];
            T* dv = gradients.qkv + static_cast<int64_t>(first + row) * sizes.qkv_row() + value_columns;
            float of_beta = 0.0f;
#pragma unroll
            for (int n = 0; n < 2 * wide_pairs; ++n) {
                const int column = wide_begin + 8 * n + column_of;
                const float2 v = pair_of(shared.values, row, column), d = pair_of(shared.d_rest, row, column);
                const float x = v.x - reads * sums[n][2 * i], y = v.y - reads * sums[n][2 * i + 1];
                of_beta += d.x * x + d.y * y;
                *reinterpret_cast<uint32_t*>(shared.values + row * wide + column) = pack(beta * x, beta * y);
                *reinterpret_cast<uint32_t*>(dv + column) = pack(beta * d.x, beta * d.y);
            }
            store_row_sum(shared.of_parts[d_beta][part], row, of_beta);
        }

        float of_reads[2] = {};
        clear(sums);  // dO S^T
        add_columns<dim, wide_pairs>(sums, shared.d, wide, rows, shared.state, wide, wide_begin);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float reads = shared.reads[row_of[i]];
#pragma unroll
            for (int n = 0; n < 2 * wide_pairs; ++n) {
                const float2 q = pair_of(shared.q, row_of[i], wide_begin + 8 * n + column_of);
                of_reads[i] += q.x * sums[n][2 * i] + q.y * sums[n][2 * i + 1];
                dq[n][2 * i] += reads * sums[n][2 * i];
                dq[n][2 * i + 1] += reads * sums[n][2 * i + 1];
            }
        }
        clear(sums);  // dR S^T
        add_columns<dim, wide_pairs>(sums, shared.d_rest, wide, rows, shared.state, wide, wide_begin);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float beta = shared.beta[row_of[i]], factor = beta * shared.reads[row_of[i]];
            float product = 0.0f;
#pragma unroll
            for (int n = 0; n < 2 * wide_pairs; ++n) {
                const float2 k = pair_of(shared.k, row_of[i], wide_begin + 8 * n + column_of);
                product += k.x * sums[n][2 * i] + k.y * sums[n][2 * i + 1];
                dk[n][2 * i] -= factor * sums[n][2 * i];
                dk[n][2 * i + 1] -= factor * sums[n][2 * i + 1];
            }
            store_row_sum(shared.of_parts[d_reads][part], row_of[i], of_reads[i] - beta * product);
        }
        __syncthreads();  // R is complete, and nobody reads S
        copy_rows<dim, dim, threads>(shared.state, wide, d_states + of_state, dim);
        commit_copies();

        clear(sums);  // V'
        add_columns<chunk, wide_pairs>(sums, shared.solve, narrow, rows, shared.values, wide, wide_begin, rows + 16);
        __syncthreads();  // nobody reads R and A
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int n = 0; n < 2 * wide_pairs; ++n) {
                *reinterpret_cast<uint32_t*>(shared.values + row_of[i] * wide + wide_begin + 8 * n + column_of) =
                    pack(sums[n][2 * i], sums[n][2 * i + 1]);
            }
        }
        wait_copies<0>();
        __syncthreads();  // V' is complete, and dS is here

        float d_scores[2 * narrow_pairs][4], d_lower[2 * narrow_pairs][4];  // dO V'^T and -dR V'^T
        clear(d_scores);
        clear(d_lower);
        add_rows<dim, narrow_pairs>(d_scores, shared.d, wide, rows, shared.values, wide, narrow_begin);
        add_rows<dim, narrow_pairs>(d_lower, shared.d_rest, wide, rows, shared.values, wide, narrow_begin);
        float of_rows[2] = {}, of_beta[2] = {};
#pragma unroll
        for (int n = 0; n < 2 * narrow_pairs; ++n) {
            float of_column[2] = {};
            const int j = narrow_begin + 8 * n + column_of;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = row_of[i];
                float into_scores[2], into_system[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool seen = j + e <= row && shared.document[row] == shared.document[j + e];
                    const float between = seen ? expf(shared.decay[row] - shared.decay[j + e]) : 0.0f;
                    const float below = j + e < row ? -d_lower[n][2 * i + e] * between : 0.0f;  // dL * D
                    const float of_keys_pair = below * keys_keys[n][2 * i + e];
                    into_scores[e] = d_scores[n][2 * i + e] * between;
                    into_system[e] = shared.beta[row] * below;
                    const float x = into_scores[e] * queries_keys[n][2 * i + e] + shared.beta[row] * of_keys_pair;
                    of_beta[i] += of_keys_pair;
                    of_rows[i] += x;
                    of_column[e] += x;
                }
                *reinterpret_cast<uint32_t*>(shared.solve + row * narrow + j) = pack(into_scores[0], into_scores[1]);
                *reinterpret_cast<uint32_t*>(shared.d_system + row * narrow + j) = pack(into_system[0], into_system[1]);
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = of_column[e];
#pragma unroll
                for (int offset = 4; offset < 32; offset *= 2) {
                    sum += __shfl_xor_sync(full_warp, sum, offset);
                }
                if (lane < 4) {
                    shared.of_columns[warp % 4][j + e] = sum;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            store_row_sum(shared.of_parts[d_decay][part], row_of[i], of_rows[i]);
            const float sum = warp_sum<4>(of_beta[i]);
            if (lane % 4 == 0) {
                shared.of_parts[d_beta][part][row_of[i]] += sum;
            }
        }

        clear(sums);  // V' dS^T
        add_columns<dim, wide_pairs>(sums, shared.values, wide, rows, shared.state, wide, wide_begin);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float left = shared.left[row_of[i]];
            float product = 0.0f;
#pragma unroll
            for (int n = 0; n < 2 * wide_pairs; ++n) {
                const float2 k = pair_of(shared.k, row_of[i], wide_begin + 8 * n + column_of);
                product += k.x * sums[n][2 * i] + k.y * sums[n][2 * i + 1];
                dk[n][2 * i] += left * sums[n][2 * i];
                dk[n][2 * i + 1] += left * sums[n][2 * i + 1];
            }
            store_row_sum(shared.of_parts[d_left][part], row_of[i], product);
        }
        __syncthreads();  // dP * D, E and the sums are complete

#pragma unroll
        for (int k = 0; k < chunk; k += 16) {
            uint32_t a[4], transposed_a[4], system[4], transposed_system[4];
            load_a(a, shared.solve, narrow, rows, k);
            load_a_transposed(transposed_a, shared.solve, narrow, rows, k);
            load_a(system, shared.d_system, narrow, rows, k);
            load_a_transposed(transposed_system, shared.d_system, narrow, rows, k);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                system[i] |= transposed_system[i];  // one of the two is zero: E is strictly lower
            }
#pragma unroll
            for (int n = 0; n < wide_pairs; ++n) {
                uint32_t of_k[4], of_q[4];
                load_b_transposed(of_k, shared.k, wide, wide_begin + 16 * n, k);
                load_b_transposed(of_q, shared.q, wide, wide_begin + 16 * n, k);
                add_pair(dq[2 * n], dq[2 * n + 1], a, of_k);
                add_pair(dk[2 * n], dk[2 * n + 1], system, of_k);
                add_pair(dk[2 * n], dk[2 * n + 1], transposed_a, of_q);
            }
        }
        if (warp == 0) {
            float of_left[2], gradient[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = half * 32 + lane;
                of_left[half] = shared.left[i] * sum_of_parts(shared.of_parts[d_left], i);
                gradient[half] = shared.reads[i] * sum_of_parts(shared.of_parts[d_reads], i) +
                                 sum_of_parts(shared.of_parts[d_decay], i) - of_left[half];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    gradient[half] -= shared.of_columns[w][i];
                }
            }
            const float carry = warp_sum(lane < warps ? shared.carried[lane] : 0.0f) * shared.reads[chunk - 1];
            const float total_left = warp_sum(of_left[0] + of_left[1]);
            if (lane == 31) {
                gradient[1] += total_left + carry;
            }
            float behind_half = 0.0f, of_a_log = 0.0f, of_dt_bias = 0.0f;
            const float a_log = inputs.a_log[head], dt_bias = inputs.dt_bias[head];
#pragma unroll
            for (int half = 1; half >= 0; --half) {
                const int i = half * 32 + lane;
                float sum = gradient[half];
#pragma unroll
                for (int offset = 1; offset < 32; offset *= 2) {
                    const float other = __shfl_down_sync(full_warp, sum, offset);
                    sum += lane + offset < 32 ? other : 0.0f;
                }
                sum += behind_half;
                behind_half = __shfl_sync(full_warp, sum, 0);
                const Decay decay = decay_of(shared.a[i], a_log, dt_bias);
                const float of_a = sum * decay.rate * decay.slope, beta = shared.beta[i];
                const float of_b = sum_of_parts(shared.of_parts[d_beta], i) * beta * (1.0f - beta);
                T* to = gradients.ba + static_cast<int64_t>(first + i) * 2 * sizes.v_heads + head;
                to[0] = __float2bfloat16_rn(of_b);
                to[sizes.v_heads] = __float2bfloat16_rn(of_a);
                of_a_log += sum * decay.g;
                of_dt_bias += of_a;
            }
            of_a_log = warp_sum(of_a_log);
            of_dt_bias = warp_sum(of_dt_bias);
            if (lane == 0) {
                float* partial = gradients.partial + (static_cast<int64_t>(at) * sizes.v_heads + head) * 2;
                partial[0] = of_a_log;
                partial[1] = of_dt_bias;
            }
        }
    }

    // The norms: y = x r with r = 1 / sqrt(sum x^2 + 1e-6), so dx = r (dy - y sum(y dy)). Of q, y and dy have the scale too.
    const float scale = rsqrtf(static_cast<float>(dim));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * wide_pairs; ++n) {
            const int column = wide_begin + 8 * n + column_of;
            const float2 q = pair_of(shared.q, row_of[i], column), k = pair_of(shared.k, row_of[i], column);
            of_q += q.x * dq[n][2 * i] + q.y * dq[n][2 * i + 1];
            of_k += k.x * dk[n][2 * i] + k.y * dk[n][2 * i + 1];
        }
        store_row_sum(shared.norms[0][part], row_of[i], of_q);
        store_row_sum(shared.norms[1][part], row_of[i], of_k);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = row_of[i];
        T* to = gradients.qkv + static_cast<int64_t>(first + row) * sizes.qkv_row() + key_head * dim;
        T* to_k = to + static_cast<int64_t>(sizes.k_heads) * dim;
        const float of_q = sum_of_parts(shared.norms[0], row), of_k = sum_of_parts(shared.norms[1], row);
        const float q_factor = shared.factors[0][row], k_factor = shared.factors[1][row];
#pragma unroll
        for (int n = 0; n < 2 * wide_pairs; ++n) {
            const int column = wide_begin + 8 * n + column_of;
            const float2 q = pair_of(shared.q, row, column), k = pair_of(shared.k, row, column);
            // q is y times the scale: y sum(y dy scale) is q sum(q dq) / scale
            *reinterpret_cast<uint32_t*>(to + column) = pack(q_factor * (dq[n][2 * i] * scale - q.x * of_q / scale),
                                                             q_factor * (dq[n][2 * i + 1] * scale - q.y * of_q / scale));
            *reinterpret_cast<uint32_t*>(to_k + column) =
                pack(k_factor * (dk[n][2 * i] - k.x * of_k), k_factor * (dk[n][2 * i + 1] - k.y * of_k));
        }
    }
}

// Sums the shares of the chunks, in order. A block has a head; a thread adds up every 256th chunk.
__global__ void __launch_bounds__(256)
    sum_partial_kernel(const float* partial, float* da_log, float* ddt_bias, int chunks, int v_heads, bool add_a_log,
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
        da_log[head] = add_a_log ? da_log[head] + sums[0] : sums[0];
        ddt_bias[head] = add_dt_bias ? ddt_bias[head] + sums[1] : sums[1];
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

void chunks_bwd(const T* dout, const Inputs& inputs, const Prepared& prepared, const Sizes& sizes, const T* states,
                const T* d_rest, const T* d_states, const Gradients& gradients, cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule_bwd";
    allow_shared_memory(chunks_bwd_kernel, sizeof(Shared), op);
    chunks_bwd_kernel<<<dim3(sizes.chunks, sizes.k_heads), threads, sizeof(Shared), stream>>>(
        dout, inputs, prepared, sizes, states, d_rest, d_states, gradients);
    check_launch(op);
}

}  // namespace surogate::delta

namespace surogate {

using namespace delta;

int64_t delta_bwd_workspace(int64_t tokens, int64_t k_heads, int64_t v_heads) {
    return workspace_in(nullptr, checked_sizes(tokens, k_heads, v_heads, "gated_delta_rule_bwd")).bytes;
}

void gated_delta_rule_bwd(const void* dout, const void* qkv, const void* ba, const void* a_log, const void* dt_bias,
                          const void* positions, const void* states, void* dqkv, void* dba, void* da_log, void* ddt_bias,
                          void* workspace, int64_t tokens, int64_t k_heads, int64_t v_heads, bool add_a_log, bool add_dt_bias,
                          cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule_bwd";
    const Sizes sizes = checked_sizes(tokens, k_heads, v_heads, op);
    const Inputs inputs = inputs_of(qkv, ba, a_log, dt_bias, positions, op);
    check_pointer(dout, op, "dout", 16);
    check_pointer(states, op, "states", 16);
    check_pointer(dqkv, op, "dqkv", 16);
    check_pointer(dba, op, "dba", 4);
    check_pointer(da_log, op, "da_log", 4);
    check_pointer(ddt_bias, op, "ddt_bias", 4);
    check_pointer(workspace, op, "workspace", 256);
    const Workspace w = workspace_in(workspace, sizes);
    prepare(inputs, w.prepared, sizes, stream);
    scan_bwd(static_cast<const T*>(dout), w.prepared, sizes, w.d_rest, w.d_states, stream);
    chunks_bwd(static_cast<const T*>(dout), inputs, w.prepared, sizes, static_cast<const T*>(states), w.d_rest, w.d_states,
               {static_cast<T*>(dqkv), static_cast<T*>(dba), w.partial}, stream);
    sum_partial_kernel<<<sizes.v_heads, 256, 0, stream>>>(w.partial, static_cast<float*>(da_log),
                                                          static_cast<float*>(ddt_bias), sizes.chunks, sizes.v_heads,
                                                          add_a_log, add_dt_bias);
    check_launch(op);
}

}  // namespace surogate
