// The products of a slice, and of a value head behind its slices: see delta_chunks_bwd.cu, of which this is the inside.
#pragma once

#include "delta_slices.cuh"

namespace surogate::delta {

// The parts of a slice. Tiles of queries and keys are [64, D], of `wide` columns.

// U = K S, then R in place of v. Adds rowsum(dR * (V - reads U)) to of_beta, and what goes through U to reads dreads, of_decay.
template <int Values>
__device__ __forceinline__ void compute_rest(const Lane& my, Stage<Values>& stage, const Head& head, const T* k,
                                             float (&of_beta)[2], float (&of_decay)[2]) {
    constexpr int columns = Values / parts, row_size = Stage<Values>::row;
    float sums[columns / 8][4];
    clear(sums);
    add_rows<dim, columns>(sums, k, wide, my.rows, stage.state, wide, columns * my.part);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = my.row_of[i];
        const float beta = head.beta[row], reads = head.reads[row];
        float of_u = 0.0f;
#pragma unroll
        for (int n = 0; n < columns / 8; ++n) {
            const int column = columns * my.part + 8 * n + my.column;
            const float2 v = pair_of(stage.values, row_size, row, column), d = pair_of(stage.d_rest, row_size, row, column);
            const float x = v.x - reads * sums[n][2 * i], y = v.y - reads * sums[n][2 * i + 1];
            of_beta[i] = add_products(of_beta[i], d, x, y);
            of_u = add_products(of_u, d, sums[n][2 * i], sums[n][2 * i + 1]);
            store_pair(stage.values, row_size, row, column, beta * x, beta * y);
        }
        of_decay[i] -= beta * reads * of_u;
    }
}

// Adds what goes through S: reads (dO S^T) to dQ, -beta reads (dR S^T) to dK, reads rowsum(Q * dO S^T) to of_decay.
template <int Values>
__device__ __forceinline__ void add_through_state(const Lane& my, const Stage<Values>& stage, const Head& head, const T* q,
                                                  float (&dq)[keys / 8][4], float (&dk)[keys / 8][4],
                                                  float (&of_decay)[2]) {
    constexpr int row_size = Stage<Values>::row;
    float of_out[keys / 8][4], of_rest[keys / 8][4];
    clear(of_out);
    clear(of_rest);
#pragma unroll
    for (int v = 0; v < Values; v += 16) {
        uint32_t out[4], rest[4];
        load_a(out, stage.d, row_size, my.rows, v);
        load_a(rest, stage.d_rest, row_size, my.rows, v);
#pragma unroll
        for (int n = 0; n < keys / 16; ++n) {
            uint32_t b[4];
            load_b_transposed(b, stage.state, wide, keys * my.part + 16 * n, v);
            add_pair(of_out[2 * n], of_out[2 * n + 1], out, b);
            add_pair(of_rest[2 * n], of_rest[2 * n + 1], rest, b);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = my.row_of[i];
        const float reads = head.reads[row], factor = head.beta[row] * reads;
        float of_q = 0.0f;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
            const int column = keys * my.part + 8 * n + my.column;
            of_q = add_products(of_q, pair_of(q, wide, row, column), of_out[n][2 * i], of_out[n][2 * i + 1]);
            dq[n][2 * i] += reads * of_out[n][2 * i];
            dq[n][2 * i + 1] += reads * of_out[n][2 * i + 1];
            dk[n][2 * i] -= factor * of_rest[n][2 * i];
            dk[n][2 * i + 1] -= factor * of_rest[n][2 * i + 1];
        }
        of_decay[i] += reads * of_q;
    }
}

// V' = A R.
template <int Values>
__device__ __forceinline__ void compute_new_values(const Lane& my, const Stage<Values>& stage, const Head& head, T* to) {
    constexpr int columns = Values / parts, row_size = Stage<Values>::row;
    float sums[columns / 8][4];
    clear(sums);
    add_columns<chunk, columns>(sums, head.solve, narrow, my.rows, stage.values, row_size, columns * my.part, my.rows + 16);
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
        const int column = columns * my.part + 8 * n + my.column;
        store_pair(to, row_size, my.row_of[0], column, sums[n][0], sums[n][1]);
        store_pair(to, row_size, my.row_of[1], column, sums[n][2], sums[n][3]);
    }
}

// Returns a thread's share of sum(S * dS).
template <int Values>
__device__ __forceinline__ float carried(const Stage<Values>& stage) {
    float sum = 0.0f;
    const int thread = thread_anew();
#pragma unroll
    for (int i = 0; i < Values * dim / 8 / threads; ++i) {
        const int word = thread + i * threads, at = word / (dim / 8) * wide + word % (dim / 8) * 8;
        const uint4 s = *reinterpret_cast<const uint4*>(stage.state + at);
        const uint4 ds = *reinterpret_cast<const uint4*>(stage.d_state + at);
        const uint32_t of_s[4] = {s.x, s.y, s.z, s.w}, of_ds[4] = {ds.x, ds.y, ds.z, ds.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 x = unpack(of_s[w]), y = unpack(of_ds[w]);
            sum = add_products(sum, x, y.x, y.y);
        }
    }
    return sum;
}

// dV = beta dR. `to`: of the first row.
template <int Values>
__device__ __forceinline__ void write_dv(const Stage<Values>& stage, const Head& head, T* to, int64_t to_row) {
    if (const int thread = thread_anew(); thread < chunk * Values / 8) {
        const int row = thread / (Values / 8), column = thread % (Values / 8) * 8;
        const uint4 d = *reinterpret_cast<const uint4*>(stage.d_rest + row * Stage<Values>::row + column);
        const float beta = head.beta[row];
        const auto scaled = [beta](uint32_t pair) { return pack(beta * unpack(pair).x, beta * unpack(pair).y); };
        *reinterpret_cast<uint4*>(to + row * to_row + column) = {scaled(d.x), scaled(d.y), scaled(d.z), scaled(d.w)};
    }
}

// dP = dO V'^T and -dL = dR V'^T, on the diagonal and below it.
template <int Values>
__device__ __forceinline__ void add_scores(const Lane& my, const Stage<Values>& stage, const T* new_values,
                                           float (&d_scores)[tokens / 8][4], float (&d_lower)[tokens / 8][4]) {
    constexpr int row_size = Stage<Values>::row;
    if (my.below_diagonal) {
#pragma unroll
        for (int v = 0; v < Values; v += 16) {
            uint32_t out[4], rest[4], b[4];
            load_a(out, stage.d, row_size, my.rows, v);
            load_a(rest, stage.d_rest, row_size, my.rows, v);
            load_b(b, new_values, row_size, tokens * my.part, v);
            add_pair(d_scores[0], d_scores[1], out, b);
            add_pair(d_lower[0], d_lower[1], rest, b);
        }
    }
}

// Adds left (V' dS^T) to dK, -left dleft to of_decay, and its sum to of_last.
template <int Values>
__device__ __forceinline__ void add_through_d_state(const Lane& my, const Stage<Values>& stage, const Head& head,
                                                    const T* new_values, const T* k, float (&dk)[keys / 8][4],
                                                    float (&of_decay)[2], float& of_last) {
    float sums[keys / 8][4];
    clear(sums);
    add_columns<Values, keys>(sums, new_values, Stage<Values>::row, my.rows, stage.d_state, wide, keys * my.part);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float left = head.left[my.row_of[i]];
        float product = 0.0f;
#pragma unroll
        for (int n = 0; n < keys / 8; ++n) {
            const float2 of_row = pair_of(k, wide, my.row_of[i], keys * my.part + 8 * n + my.column);
            product = add_products(product, of_row, sums[n][2 * i], sums[n][2 * i + 1]);
            dk[n][2 * i] += left * sums[n][2 * i];
            dk[n][2 * i + 1] += left * sums[n][2 * i + 1];
        }
        const float d_left = my.row_of[i] < chunk - 1 ? left * product : 0.0f;  // that of the last token cancels
        of_decay[i] -= d_left;
        of_last += d_left;
    }
}

// The parts of a value head, behind its slices.

// Leaves dP * D in place of A, E, and the sums of X over the rows of a warp. Adds rowsum(dL * K K^T * D) and rowsum(X).
template <class Memory>
__device__ __forceinline__ void mask_scores(const Lane& my, Memory& shared, Head& head, const float (&d_scores)[tokens / 8][4],
                                            const float (&d_lower)[tokens / 8][4], float (&of_beta)[2],
                                            float (&of_decay)[2]) {
    if (!my.below_diagonal) {
        return;
    }
    // Computed anew for each value head: across the slices, registers have no room for them.
    float keys_keys[tokens / 8][4], queries_keys[tokens / 8][4];
    clear(keys_keys);
    clear(queries_keys);
#pragma unroll
    for (int k = 0; k < dim; k += 16) {
        uint32_t a[4], q[4], b[4];
        load_a(a, shared.k, wide, my.rows, k);
        load_a(q, shared.q, wide, my.rows, k);
        load_b(b, shared.k, wide, tokens * my.part, k);
        add_pair(keys_keys[0], keys_keys[1], a, b);
        add_pair(queries_keys[0], queries_keys[1], q, b);
    }
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
        float of_column[2] = {};
        const int j = tokens * my.part + 8 * n + my.column;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = my.row_of[i];
            const int document = shared.document[row];
            const float beta = head.beta[row], decay = head.decay[row];
            float into_scores[2], into_system[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool seen = (j + e <= row) & (document == shared.document[j + e]);
                // One exponential without a branch: that of minus infinity is 0.
                const float between = expf(seen ? decay - head.decay[j + e] : -INFINITY);
                const float below = j + e < row ? -d_lower[n][2 * i + e] * between : 0.0f;  // dL * D
                const float of_keys_pair = below * keys_keys[n][2 * i + e];
                into_scores[e] = d_scores[n][2 * i + e] * between;
                into_system[e] = beta * below;
                // On the diagonal X is large where decays are fast, and its sums over rows and columns cancel: 0 is exact.
                const float of_pair = j + e < row ? into_scores[e] * queries_keys[n][2 * i + e] : 0.0f;
                const float x = of_pair + beta * of_keys_pair;
                of_beta[i] += of_keys_pair;
                of_decay[i] += x;
                of_column[e] += x;
            }
            store_pair(head.solve, narrow, row, j, into_scores[0], into_scores[1]);
            store_pair(shared.d_system, narrow, row, j, into_system[0], into_system[1]);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float sum = of_column[e];
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2) {
                sum += __shfl_xor_sync(full_warp, sum, offset);
            }
            if (my.lane < 4) {
                shared.of_columns[my.rows / 16][j + e] = sum;
            }
        }
    }
}

// Adds (dP * D) K to dQ, (dP * D)^T Q + (E + E^T) K to dK. Matrices are of tokens up to each, their transposes of those from it.
template <class Memory>
__device__ __forceinline__ void add_inside_of_chunk(const Lane& my, const Memory& shared, const Head& head,
                                                    float (&dq)[keys / 8][4], float (&dk)[keys / 8][4]) {
#pragma unroll
    for (int k = 0; k < chunk; k += 16) {
        uint32_t of_k[keys / 16][4], scores[4], system[4];
#pragma unroll
        for (int n = 0; n < keys / 16; ++n) {
            load_b_transposed(of_k[n], shared.k, wide, keys * my.part + 16 * n, k);
        }
        if (k <= my.rows) {
            load_a(scores, head.solve, narrow, my.rows, k);
            load_a(system, shared.d_system, narrow, my.rows, k);
#pragma unroll
            for (int n = 0; n < keys / 16; ++n) {
                add_pair(dq[2 * n], dq[2 * n + 1], scores, of_k[n]);
                add_pair(dk[2 * n], dk[2 * n + 1], system, of_k[n]);
            }
        }
        if (k >= my.rows) {
            load_a_transposed(scores, head.solve, narrow, my.rows, k);
            load_a_transposed(system, shared.d_system, narrow, my.rows, k);
#pragma unroll
            for (int n = 0; n < keys / 16; ++n) {
                uint32_t of_q[4];
                load_b_transposed(of_q, shared.q, wide, keys * my.part + 16 * n, k);
                add_pair(dk[2 * n], dk[2 * n + 1], system, of_k[n]);
                add_pair(dk[2 * n], dk[2 * n + 1], scores, of_q);
            }
        }
    }
}

}  // namespace surogate::delta
