// Gradients of the gated delta rule that a chunk computes by itself (delta.h): of q, k, v, b and a.
//
// With S in front of the chunk, dS behind it and dR (delta_scan_bwd.cu), U = K S, R = beta (V - reads U) and V' = A R anew:
//   dV = beta dR     dbeta = rowsum(dR * (V - reads U)) + rowsum(dL * K K^T * D)
//   dP = dO V'^T     dL = -dR V'^T, strictly lower: L is what A inverts, and dA = dV' R^T, so -A^T dA A^T = -dR V'^T
//   dQ = reads (dO S^T) + (dP * D) K
//   dK = -beta reads (dR S^T) + left (V' dS^T) + (dP * D)^T Q + (E + E^T) K     E = beta dL * D
//   dreads = rowsum(Q * dO S^T) - beta rowsum(K * dR S^T)     dleft = rowsum(K * V' dS^T)     dcarry = sum(S * dS)
//   X = dP * P + dL * L     dG = reads dreads + rowsum(X) - colsum(X) - left dleft, and of the last token also
//   sum(left dleft) + carry dcarry     dg = reversed cumsum(dG), of the tokens of the document
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
//
// Products of a chunk and value head: 6.4M multiply-adds. 8,192 tokens and 32 heads: 52 GFLOP, 0.13 ms at 400 TFLOP/s. Bytes:
// S and dS 32 KiB a token, read once; qkv, dO and dR 32, dqkv 16: 0.14 ms at 4.8 TB/s. Operands: 8,700 cycles, 0.16 ms.

#include <algorithm>

#include "delta_bwd.cuh"

namespace surogate::delta {
namespace {

constexpr int parts = 4, warps = 4 * parts, threads = 32 * warps;  // parts: of the columns
constexpr int keys = dim / parts, tokens = chunk / parts;          // columns that a warp has of each kind

// `Values`: of a slice.
template <int Values>
struct Stage {
    static constexpr int row = Values + 8;
    T state[Values * wide], d_state[Values * wide];                // S^T and dS^T
    T d[chunk * row], d_rest[chunk * row], values[chunk * row];  // dO, dR; v, then R
};

// Of a value head.
struct Head {
    T solve[chunk * narrow];  // A, then dP * D
    float decay[chunk], reads[chunk], left[chunk], beta[chunk], a[chunk];
};

template <int Values, int Stages>
struct Shared {
    T q[chunk * wide], k[chunk * wide];  // then their gradients
    Stage<Values> stages[Stages];
    Head heads[Stages];
    T new_values[chunk * Stage<Values>::row];  // V'
    T d_system[chunk * narrow];                // E
    float of_parts[2][parts][chunk];           // sums over rows: of dbeta, dG
    float of_columns[4][chunk];                // sums of X over the rows of a warp
    float of_last[warps];                      // left dleft + carry dcarry
    float norms[2][parts][chunk];              // of the gradients of q and k
    float factors[2][chunk];                   // of q and k, 1 / sqrt(sum x^2 + 1e-6)
    int document[chunk];
};

enum Row { d_beta, d_decay };

struct Operands {
    const T* dout;
    Inputs inputs;
    Prepared prepared;
    Sizes sizes;
    const T *states, *d_rest, *d_states;
};

// What a stage has: a slice of the values of a value head, of a chunk of a key head (`item`).
struct Place {
    int item, of_share, slice;

    template <int Slices>
    __device__ __forceinline__ Place next(int share) const {
        if (slice + 1 < Slices) {
            return {item, of_share, slice + 1};
        }
        return of_share + 1 < share ? Place{item, of_share + 1, 0} : Place{item + static_cast<int>(gridDim.x), 0, 0};
    }
};

__device__ __forceinline__ float2 pair_of(const T* tile, int tile_row, int row, int column) {
    return unpack(*reinterpret_cast<const uint32_t*>(tile + row * tile_row + column));
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

// A warp's rows of a tile [64, D] in turn: `use` gets the row and the first of a lane's four columns.
template <class Use>
__device__ __forceinline__ void for_rows(Use use) {
#pragma unroll
    for (int i = 0; i < chunk / warps; ++i) {
        use(i, static_cast<int>(threadIdx.x) / 32 + i * warps, 4 * static_cast<int>(threadIdx.x % 32));
    }
}

// Norms 64 rows, as prepare.cu does, in their own order.
__device__ __forceinline__ void norm_rows(const T* from, int64_t from_row, T* tile, float (&factors)[chunk], float scale) {
    uint2 words[chunk / warps];
    for_rows([&](int i, int r, int c) { words[i] = *reinterpret_cast<const uint2*>(from + r * from_row + c); });
    for_rows([&](int i, int r, int c) {
        const float2 a = unpack(words[i].x), b = unpack(words[i].y);
        const float root = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) + 1e-6f), factor = root * scale;
        *reinterpret_cast<uint2*>(tile + r * wide + c) = {pack(a.x * factor, a.y * factor), pack(b.x * factor, b.y * factor)};
        factors[r] = root;
    });
}

template <int Values, int Slices>
__device__ __forceinline__ void load_stage(Stage<Values>& stage, Head& of_head, const Operands& from, const Place& place) {
    constexpr int row = Stage<Values>::row;
    const Sizes& sizes = from.sizes;
    const int first = place.item / sizes.k_heads * chunk, column = place.slice * Values;
    const int head = place.item % sizes.k_heads * sizes.share + place.of_share;
    const int64_t of_state = (static_cast<int64_t>(first / chunk) * sizes.v_heads + head) * dim * dim + column * dim;
    const int64_t of_values = first * sizes.values_row() + head * dim + column;
    copy_rows<dim, Values, threads>(stage.state, wide, from.states + of_state, dim);
    copy_rows<dim, Values, threads>(stage.d_state, wide, from.d_states + of_state, dim);
    copy_rows<Values, chunk, threads>(stage.d, row, from.dout + of_values, sizes.values_row());
    copy_rows<Values, chunk, threads>(stage.d_rest, row, from.d_rest + of_values, sizes.values_row());
    copy_rows<Values, chunk, threads>(
        stage.values, row,
        from.inputs.qkv + first * sizes.qkv_row() + static_cast<int64_t>(2 * sizes.k_heads + head) * dim + column,
        sizes.qkv_row());
    if (place.slice == 0) {
        const int64_t of_chunk = (static_cast<int64_t>(head) * sizes.chunks + first / chunk) * chunk * chunk;
        const int64_t of_tokens = static_cast<int64_t>(head) * sizes.tokens + first;
        copy_rows<chunk, chunk, threads>(of_head.solve, narrow, from.prepared.solve + of_chunk, chunk);
        if (threadIdx.x < chunk) {
            const int which = static_cast<int>(threadIdx.x) / (chunk / 4), i = threadIdx.x % (chunk / 4) * 4;
            const Prepared& p = from.prepared;
            const float* numbers = which == 0 ? p.decay : which == 1 ? p.reads : which == 2 ? p.left : p.beta;
            float* to = which == 0 ? of_head.decay : which == 1 ? of_head.reads : which == 2 ? of_head.left : of_head.beta;
            copy_async(to + i, numbers + of_tokens + i, true);
        }
    }
}

// sums += a [16 rows, Terms] b^T, of tiles [rows, Terms] and [columns, Terms].
template <int Terms, int Columns>
__device__ __forceinline__ void add_rows(float (&sums)[Columns / 8][4], const T* a_tile, int a_row, int rows,
                                         const T* b_tile, int b_row, int columns) {
    if constexpr (Columns == 8) {
#pragma unroll
        for (int k = 0; k < Terms; k += 32) {
            uint32_t a[2][4], b[4];
            load_a(a[0], a_tile, a_row, rows, k);
            load_a(a[1], a_tile, a_row, rows, k + 16);
            load_b_of_8(b, b_tile, b_row, columns, k);
            multiply_add(sums[0], a[0], b[0], b[1]);
            multiply_add(sums[0], a[1], b[2], b[3]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < Terms; k += 16) {
            uint32_t a[4], b[Columns / 16][4];
            load_a(a, a_tile, a_row, rows, k);
#pragma unroll
            for (int n = 0; n < Columns / 16; ++n) {
                load_b(b[n], b_tile, b_row, columns + 16 * n, k);
                add_pair(sums[2 * n], sums[2 * n + 1], a, b[n]);
            }
        }
    }
}

// sums += a [16 rows, Terms] b, of tiles [rows, Terms] and [Terms, columns]. Only terms before `terms`, or some more.
template <int Terms, int Columns>
__device__ __forceinline__ void add_columns(float (&sums)[Columns / 8][4], const T* a_tile, int a_row, int rows,
                                            const T* b_tile, int b_row, int columns, int terms = Terms) {
    if constexpr (Columns == 8) {
#pragma unroll
        for (int k = 0; k < Terms; k += 32) {
            if (k < terms) {
                uint32_t a[2][4], b[4];
                load_a(a[0], a_tile, a_row, rows, k);
                load_a(a[1], a_tile, a_row, rows, k + 16);
                load_b_transposed_of_8(b, b_tile, b_row, columns, k);
                multiply_add(sums[0], a[0], b[0], b[1]);
                multiply_add(sums[0], a[1], b[2], b[3]);
            }
        }
    } else {
#pragma unroll
        for (int k = 0; k < Terms; k += 16) {
            if (k < terms) {
                uint32_t a[4], b[Columns / 16][4];
                load_a(a, a_tile, a_row, rows, k);
#pragma unroll
                for (int n = 0; n < Columns / 16; ++n) {
                    load_b_transposed(b[n], b_tile, b_row, columns + 16 * n, k);
                    add_pair(sums[2 * n], sums[2 * n + 1], a, b[n]);
                }
            }
        }
    }
}

// The gradients of b and a of a value head from the sums that all warps have left. A warp calls it.
template <class Memory>
__device__ __forceinline__ void finish_head(const Memory& shared, const Head& of_head, const Operands& from,
                                            const Gradients& gradients, int at, int head) {
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
    const float a_log = from.inputs.a_log[head], dt_bias = from.inputs.dt_bias[head];
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
        const Decay decay = decay_of(of_head.a[i], a_log, dt_bias);
        const float of_a = sum * decay.rate * decay.slope, beta = of_head.beta[i];
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

template <int Values, int Stages>
__global__ void __launch_bounds__(threads, 1) chunks_bwd_kernel(Operands from, Gradients gradients) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Shared<Values, Stages>*>(memory);
    constexpr int slices = dim / Values, columns = Values / parts, row_size = Stage<Values>::row;
    const Sizes& sizes = from.sizes;
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32, part = warp / 4;
    const int rows = 16 * (part % 2 == 0 ? warp % 4 : 3 - warp % 4);
    const int keys_begin = keys * part, tokens_begin = tokens * part, values_begin = columns * part;
    const int row_of[2] = {rows + lane / 4, rows + lane / 4 + 8}, column_of = 2 * (lane % 4);
    const bool below_diagonal = tokens_begin <= rows;  // else no token of these columns is read by one of these rows
    const int items = sizes.chunks * sizes.k_heads;
    const float scale = rsqrtf(static_cast<float>(dim));

    Place place{static_cast<int>(blockIdx.x), 0, 0};
    int stage_at = 0, head_at = 0;
    if constexpr (Stages == 2) {
        load_stage<Values, slices>(shared.stages[0], shared.heads[0], from, place);
        commit_copies();
    }
    while (place.item < items) {
        const int at = place.item / sizes.k_heads, key_head = place.item % sizes.k_heads, first = at * chunk;
        const T* queries = from.inputs.qkv + first * sizes.qkv_row() + key_head * dim;
        norm_rows(queries, sizes.qkv_row(), shared.q, shared.factors[0], scale);
        norm_rows(queries + static_cast<int64_t>(sizes.k_heads) * dim, sizes.qkv_row(), shared.k, shared.factors[1], 1.0f);
        if (warp == 0) {
            count_documents(shared.document, from.inputs.positions + first);
        }
        float dq[keys / 8][4], dk[keys / 8][4];
        clear(dq);
        clear(dk);
        for (int of_share = 0; of_share < sizes.share; ++of_share) {
            const int head = key_head * sizes.share + of_share;
            Head& of_head = shared.heads[head_at];
            float of_beta[2] = {}, of_decay[2] = {}, of_last = 0.0f;
            float d_scores[tokens / 8][4], d_lower[tokens / 8][4];  // dP = dO V'^T, and -dL = dR V'^T
            clear(d_scores);
            clear(d_lower);
#pragma unroll 1
            for (int slice = 0; slice < slices; ++slice) {
                Stage<Values>& stage = shared.stages[stage_at];
                const Place next = place.next<slices>(sizes.share);
                if constexpr (Stages == 1) {
                    __syncthreads();  // nobody reads the last slice, or what is of the last head
                    load_stage<Values, slices>(stage, of_head, from, place);
                    commit_copies();
                }
                wait_copies<0>();
                __syncthreads();  // this slice is here, and nobody reads the last one
                if constexpr (Stages == 2) {
                    if (next.item < items) {
                        load_stage<Values, slices>(shared.stages[1 - stage_at], shared.heads[1 - head_at], from, next);
                    }
                    commit_copies();
                }
                place = next;
                T a = __float2bfloat16_rn(0.0f);
                if (slice == 0 && threadIdx.x < chunk) {
                    a = from.inputs.ba[static_cast<int64_t>(first + threadIdx.x) * 2 * sizes.v_heads + sizes.v_heads + head];
                }

                float of_values[columns / 8][4];
                clear(of_values);  // U
                add_rows<dim, columns>(of_values, shared.k, wide, rows, stage.state, wide, values_begin);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float beta = of_head.beta[row_of[i]], reads = of_head.reads[row_of[i]];
#pragma unroll
                    for (int n = 0; n < columns / 8; ++n) {
                        const int column = values_begin + 8 * n + column_of;
                        const float2 v = pair_of(stage.values, row_size, row_of[i], column);
                        const float2 d = pair_of(stage.d_rest, row_size, row_of[i], column);
                        const float x = v.x - reads * of_values[n][2 * i], y = v.y - reads * of_values[n][2 * i + 1];
                        of_beta[i] += d.x * x + d.y * y;
                        *reinterpret_cast<uint32_t*>(stage.values + row_of[i] * row_size + column) = pack(beta * x, beta * y);
                    }
                }
                {
                    float d_out[keys / 8][4], d_system[keys / 8][4];  // dO S^T and dR S^T
                    clear(d_out);
                    clear(d_system);
#pragma unroll
                    for (int k = 0; k < Values; k += 16) {
                        uint32_t out[4], rest[4];
                        load_a(out, stage.d, row_size, rows, k);
                        load_a(rest, stage.d_rest, row_size, rows, k);
#pragma unroll
                        for (int n = 0; n < keys / 16; ++n) {
                            uint32_t b[4];
                            load_b_transposed(b, stage.state, wide, keys_begin + 16 * n, k);
                            add_pair(d_out[2 * n], d_out[2 * n + 1], out, b);
                            add_pair(d_system[2 * n], d_system[2 * n + 1], rest, b);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float beta = of_head.beta[row_of[i]], reads = of_head.reads[row_of[i]], factor = beta * reads;
                        float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
                        for (int n = 0; n < keys / 8; ++n) {
                            const int column = keys_begin + 8 * n + column_of;
                            const float2 q = pair_of(shared.q, wide, row_of[i], column);
                            const float2 k = pair_of(shared.k, wide, row_of[i], column);
                            of_q += q.x * d_out[n][2 * i] + q.y * d_out[n][2 * i + 1];
                            of_k += k.x * d_system[n][2 * i] + k.y * d_system[n][2 * i + 1];
                            dq[n][2 * i] += reads * d_out[n][2 * i];
                            dq[n][2 * i + 1] += reads * d_out[n][2 * i + 1];
                            dk[n][2 * i] -= factor * d_system[n][2 * i];
                            dk[n][2 * i + 1] -= factor * d_system[n][2 * i + 1];
                        }
                        of_decay[i] += reads * (of_q - beta * of_k);
                    }
                }
                if (slice == 0 && threadIdx.x < chunk) {
                    of_head.a[threadIdx.x] = __bfloat162float(a);
                }
                __syncthreads();  // R is complete

                clear(of_values);  // V'
                add_columns<chunk, columns>(of_values, of_head.solve, narrow, rows, stage.values, row_size, values_begin,
                                            rows + 16);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int n = 0; n < columns / 8; ++n) {
                        *reinterpret_cast<uint32_t*>(shared.new_values + row_of[i] * row_size + values_begin + 8 * n +
                                                     column_of) = pack(of_values[n][2 * i], of_values[n][2 * i + 1]);
                    }
                }
                const float carry = of_head.reads[chunk - 1];
#pragma unroll
                for (int word = threadIdx.x; word < Values * dim / 8; word += threads) {  // S * dS
                    const int place_of_word = word / (dim / 8) * wide + word % (dim / 8) * 8;
                    const uint4 s = *reinterpret_cast<const uint4*>(stage.state + place_of_word);
                    const uint4 ds = *reinterpret_cast<const uint4*>(stage.d_state + place_of_word);
                    const uint32_t of_s[4] = {s.x, s.y, s.z, s.w}, of_ds[4] = {ds.x, ds.y, ds.z, ds.w};
                    float sum = 0.0f;
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        const float2 x = unpack(of_s[w]), y = unpack(of_ds[w]);
                        sum += x.x * y.x + x.y * y.y;
                    }
                    of_last += carry * sum;
                }
                if (threadIdx.x < chunk * Values / 8) {  // dV
                    const int row = static_cast<int>(threadIdx.x) / (Values / 8), column = threadIdx.x % (Values / 8) * 8;
                    const uint4 d = *reinterpret_cast<const uint4*>(stage.d_rest + row * row_size + column);
                    const float beta = of_head.beta[row];
                    const float2 x[4] = {unpack(d.x), unpack(d.y), unpack(d.z), unpack(d.w)};
                    T* dv = gradients.qkv + (first + row) * sizes.qkv_row() +
                            static_cast<int64_t>(2 * sizes.k_heads + head) * dim + slice * Values + column;
                    *reinterpret_cast<uint4*>(dv) = {pack(beta * x[0].x, beta * x[0].y), pack(beta * x[1].x, beta * x[1].y),
                                                     pack(beta * x[2].x, beta * x[2].y), pack(beta * x[3].x, beta * x[3].y)};
                }
                __syncthreads();  // V' is complete

                if (below_diagonal) {
#pragma unroll
                    for (int k = 0; k < Values; k += 16) {
                        uint32_t out[4], rest[4], b[4];
                        load_a(out, stage.d, row_size, rows, k);
                        load_a(rest, stage.d_rest, row_size, rows, k);
                        load_b(b, shared.new_values, row_size, tokens_begin, k);
                        add_pair(d_scores[0], d_scores[1], out, b);
                        add_pair(d_lower[0], d_lower[1], rest, b);
                    }
                }
                float of_keys[keys / 8][4];
                clear(of_keys);  // V' dS^T
                add_columns<Values, keys>(of_keys, shared.new_values, row_size, rows, stage.d_state, wide, keys_begin);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float left = of_head.left[row_of[i]];
                    float product = 0.0f;
#pragma unroll
                    for (int n = 0; n < keys / 8; ++n) {
                        const float2 k = pair_of(shared.k, wide, row_of[i], keys_begin + 8 * n + column_of);
                        product += k.x * of_keys[n][2 * i] + k.y * of_keys[n][2 * i + 1];
                        dk[n][2 * i] += left * of_keys[n][2 * i];
                        dk[n][2 * i + 1] += left * of_keys[n][2 * i + 1];
                    }
                    of_decay[i] -= left * product;
                    of_last += left * product;
                }
                stage_at = (stage_at + 1) % Stages;
            }

            if (below_diagonal) {
                // Computed anew for each value head: across the slices, registers have no room for them.
                float keys_keys[tokens / 8][4], queries_keys[tokens / 8][4];
                clear(keys_keys);
                clear(queries_keys);
#pragma unroll
                for (int k = 0; k < dim; k += 16) {
                    uint32_t a[4], q[4], b[4];
                    load_a(a, shared.k, wide, rows, k);
                    load_a(q, shared.q, wide, rows, k);
                    load_b(b, shared.k, wide, tokens_begin, k);
                    add_pair(keys_keys[0], keys_keys[1], a, b);
                    add_pair(queries_keys[0], queries_keys[1], q, b);
                }
#pragma unroll
                for (int n = 0; n < tokens / 8; ++n) {
                    float of_column[2] = {};
                    const int j = tokens_begin + 8 * n + column_of;
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int row = row_of[i];
                        const float beta = of_head.beta[row];
                        float into_scores[2], into_system[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const bool seen = j + e <= row && shared.document[row] == shared.document[j + e];
                            const float between = seen ? expf(of_head.decay[row] - of_head.decay[j + e]) : 0.0f;
                            const float below = j + e < row ? -d_lower[n][2 * i + e] * between : 0.0f;  // dL * D
                            const float of_keys_pair = below * keys_keys[n][2 * i + e];
                            into_scores[e] = d_scores[n][2 * i + e] * between;
                            into_system[e] = beta * below;
                            const float x = into_scores[e] * queries_keys[n][2 * i + e] + beta * of_keys_pair;
                            of_beta[i] += of_keys_pair;
                            of_decay[i] += x;
                            of_column[e] += x;
                        }
                        *reinterpret_cast<uint32_t*>(of_head.solve + row * narrow + j) = pack(into_scores[0], into_scores[1]);
                        *reinterpret_cast<uint32_t*>(shared.d_system + row * narrow + j) =
                            pack(into_system[0], into_system[1]);
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float sum = of_column[e];
#pragma unroll
                        for (int offset = 4; offset < 32; offset *= 2) {
                            sum += __shfl_xor_sync(full_warp, sum, offset);
                        }
                        if (lane < 4) {
                            shared.of_columns[rows / 16][j + e] = sum;
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                store_row_sum(shared.of_parts[d_beta][part], row_of[i], of_beta[i]);
                store_row_sum(shared.of_parts[d_decay][part], row_of[i], of_decay[i]);
            }
            of_last = warp_sum(of_last);
            if (lane == 0) {
                shared.of_last[warp] = of_last;
            }
            __syncthreads();  // dP * D, E and the sums are complete

#pragma unroll
            for (int k = 0; k < chunk; k += 16) {  // E + E^T is of all tokens, dP of those before, its transpose of those behind
                uint32_t of_k[keys / 16][4], a[4], system[4];
#pragma unroll
                for (int n = 0; n < keys / 16; ++n) {
                    load_b_transposed(of_k[n], shared.k, wide, keys_begin + 16 * n, k);
                }
                if (k <= rows) {
                    load_a(a, of_head.solve, narrow, rows, k);
                    load_a(system, shared.d_system, narrow, rows, k);
#pragma unroll
                    for (int n = 0; n < keys / 16; ++n) {
                        add_pair(dq[2 * n], dq[2 * n + 1], a, of_k[n]);
                        add_pair(dk[2 * n], dk[2 * n + 1], system, of_k[n]);
                    }
                }
                if (k >= rows) {
                    load_a_transposed(a, of_head.solve, narrow, rows, k);
                    load_a_transposed(system, shared.d_system, narrow, rows, k);
#pragma unroll
                    for (int n = 0; n < keys / 16; ++n) {
                        uint32_t of_q[4];
                        load_b_transposed(of_q, shared.q, wide, keys_begin + 16 * n, k);
                        add_pair(dk[2 * n], dk[2 * n + 1], system, of_k[n]);
                        add_pair(dk[2 * n], dk[2 * n + 1], a, of_q);
                    }
                }
            }
            if (warp == 0) {
                finish_head(shared, of_head, from, gradients, at, head);
            }
            head_at = (head_at + 1) % Stages;
        }

        // The norms: y = x r with r = 1 / sqrt(sum x^2 + 1e-6), so dx = r (dy - y sum(y dy)). Of q, y and dy have the scale too.
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float of_q = 0.0f, of_k = 0.0f;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
                const int column = keys_begin + 8 * n + column_of;
                const float2 q = pair_of(shared.q, wide, row_of[i], column), k = pair_of(shared.k, wide, row_of[i], column);
                of_q += q.x * dq[n][2 * i] + q.y * dq[n][2 * i + 1];
                of_k += k.x * dk[n][2 * i] + k.y * dk[n][2 * i + 1];
            }
            store_row_sum(shared.norms[0][part], row_of[i], of_q);
            store_row_sum(shared.norms[1][part], row_of[i], of_k);
        }
        __syncthreads();  // and nobody multiplies q and k
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row_of[i];
            const float of_q = sum_of_parts(shared.norms[0], row), of_k = sum_of_parts(shared.norms[1], row);
            const float q_factor = shared.factors[0][row], k_factor = shared.factors[1][row];
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
                const int column = keys_begin + 8 * n + column_of;
                const float2 q = pair_of(shared.q, wide, row, column), k = pair_of(shared.k, wide, row, column);
                // q is y times the scale: y sum(y dy scale) is q sum(q dq) / scale
                *reinterpret_cast<uint32_t*>(shared.q + row * wide + column) =
                    pack(q_factor * (dq[n][2 * i] * scale - q.x * of_q / scale),
                         q_factor * (dq[n][2 * i + 1] * scale - q.y * of_q / scale));
                *reinterpret_cast<uint32_t*>(shared.k + row * wide + column) =
                    pack(k_factor * (dk[n][2 * i] - k.x * of_k), k_factor * (dk[n][2 * i + 1] - k.y * of_k));
            }
        }
        __syncthreads();
        T* to = gradients.qkv + first * sizes.qkv_row() + key_head * dim;  // a lane writes what it will norm next
        for_rows([&](int, int r, int c) {
            T* of_row = to + r * sizes.qkv_row() + c;
            *reinterpret_cast<uint2*>(of_row) = *reinterpret_cast<const uint2*>(shared.q + r * wide + c);
            *reinterpret_cast<uint2*>(of_row + static_cast<int64_t>(sizes.k_heads) * dim) =
                *reinterpret_cast<const uint2*>(shared.k + r * wide + c);
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
