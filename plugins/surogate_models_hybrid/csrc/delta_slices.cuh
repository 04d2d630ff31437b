// What a block of delta_chunks_bwd.cu has in shared memory, and products of operands from there.
#pragma once

#include "delta_bwd.cuh"

namespace surogate::delta {

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
    float decay[chunk], reads[chunk], left[chunk], beta[chunk];
    float g[chunk], slope[chunk];  // of the decays, dg / da
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

// Rows of Shared::of_parts.
enum { d_beta, d_decay };

struct Operands {
    const T* dout;
    Inputs inputs;
    Prepared prepared;
    Sizes sizes;
    const T *states, *d_rest, *d_states;
};

// What a stage has: a slice of the values of a value head, of a chunk of a key head.
struct Place {
    int at, key_head, of_share, slice;

    __device__ __forceinline__ static Place of_item(int item, const Sizes& sizes) {
        return {item / sizes.k_heads, item % sizes.k_heads, 0, 0};
    }
    // Items are chunks and key heads; a block has every gridDim.x-th of them.
    __device__ __forceinline__ Place next_item(const Sizes& sizes) const {
        return of_item(at * sizes.k_heads + key_head + static_cast<int>(gridDim.x), sizes);
    }
    template <int Slices>
    __device__ __forceinline__ Place next(const Sizes& sizes) const {
        if (slice + 1 < Slices) {
            return {at, key_head, of_share, slice + 1};
        }
        if (of_share + 1 < sizes.share) {
            return {at, key_head, of_share + 1, 0};
        }
        return next_item(sizes);
    }
    __device__ __forceinline__ bool exists(const Sizes& sizes) const { return at < sizes.chunks; }
};

// The index of the thread, of which the compiler knows nothing: so what is computed from it is computed where it is used, and not
// kept in registers, of which this kernel has too few.
__device__ __forceinline__ int thread_anew() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return static_cast<int>(thread);
}

// copy_rows() with one address for all of a thread's words. The scans, which have registers for more, are slower with it.
template <int Columns, int Rows>
__device__ __forceinline__ void copy_tile(T* to, int row, const T* from, int64_t from_row, int thread) {
    constexpr int words = Columns / 8, at_once = threads / words;
    const int first = thread / words, column = thread % words * 8;
    to += first * row + column;
    from += first * from_row + column;
#pragma unroll
    for (int i = 0; i < (Rows + at_once - 1) / at_once; ++i) {
        if (Rows >= at_once || first < Rows) {
            copy_async(to + i * at_once * row, from + i * at_once * from_row, true);
        }
    }
}

// What a thread has of results: rows `row_of`, and the columns `column` and the next of each 8 columns of its warp.
struct Lane {
    int lane, warp, part, rows, row_of[2], column;
    bool below_diagonal;  // of its tokens as columns: else its rows read none of them

    __device__ __forceinline__ Lane() {
        const int thread = thread_anew();
        lane = thread % 32;
        warp = thread / 32;
        part = warp / 4;
        rows = 16 * (part % 2 == 0 ? warp % 4 : 3 - warp % 4);
        row_of[0] = rows + lane / 4;
        row_of[1] = row_of[0] + 8;
        column = 2 * (lane % 4);
        below_diagonal = tokens * part <= rows;
    }
};

__device__ __forceinline__ float2 pair_of(const T* tile, int tile_row, int row, int column) {
    return unpack(*reinterpret_cast<const uint32_t*>(tile + row * tile_row + column));
}

// sum + a.x x + a.y y, by two instructions.
__device__ __forceinline__ float add_products(float sum, float2 a, float x, float y) { return fmaf(a.y, y, fmaf(a.x, x, sum)); }

// Adds over the four lanes that share a row, and stores the sum of this part of the columns.
__device__ __forceinline__ void store_row_sum(float (&of_part)[chunk], int row, float sum) {
    sum = warp_sum<4>(sum);
    if (threadIdx.x % 4 == 0) {
        of_part[row] = sum;
    }
}

__device__ __forceinline__ void store_pair(T* tile, int tile_row, int row, int column, float x, float y) {
    *reinterpret_cast<uint32_t*>(tile + row * tile_row + column) = pack(x, y);
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
    const int thread = thread_anew();
#pragma unroll
    for (int i = 0; i < chunk / warps; ++i) {
        use(i, thread / 32 + i * warps, thread % 32 * 4);
    }
}

// Rows of queries and keys of a chunk as they are in memory, and positions: of the warp, which loads them ahead of their use.
struct Rows {
    uint2 words[2][chunk / warps];
    int positions[2];

    __device__ __forceinline__ void load(const Operands& from, const Place& place) {
        const Sizes& sizes = from.sizes;
        const int first = place.at * chunk, lane = threadIdx.x % 32;
        const T* queries = from.inputs.qkv + first * sizes.qkv_row() + place.key_head * dim;
        for_rows([&](int i, int r, int c) {
            const T* row = queries + r * sizes.qkv_row() + c;
            words[0][i] = *reinterpret_cast<const uint2*>(row);
            words[1][i] = *reinterpret_cast<const uint2*>(row + static_cast<int64_t>(sizes.k_heads) * dim);
        });
        positions[0] = from.inputs.positions[first + lane];
        positions[1] = from.inputs.positions[first + 32 + lane];
    }
};

// Norms 64 rows, as prepare.cu does, in their own order.
__device__ __forceinline__ void norm_rows(const uint2 (&words)[chunk / warps], T* tile, float (&factors)[chunk], float scale) {
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
    const int first = place.at * chunk, column = place.slice * Values, thread = thread_anew();
    const int head = place.key_head * sizes.share + place.of_share;
    const int64_t of_state = (static_cast<int64_t>(place.at) * sizes.v_heads + head) * dim * dim + column * dim;
    const int64_t of_values = first * sizes.values_row() + head * dim + column;
    copy_tile<dim, Values>(stage.state, wide, from.states + of_state, dim, thread);
    copy_tile<dim, Values>(stage.d_state, wide, from.d_states + of_state, dim, thread);
    copy_tile<Values, chunk>(stage.d, row, from.dout + of_values, sizes.values_row(), thread);
    copy_tile<Values, chunk>(stage.d_rest, row, from.d_rest + of_values, sizes.values_row(), thread);
    copy_tile<Values, chunk>(
        stage.values, row,
        from.inputs.qkv + first * sizes.qkv_row() + static_cast<int64_t>(2 * sizes.k_heads + head) * dim + column,
        sizes.qkv_row(), thread);
    if (place.slice == 0) {
        const int64_t of_chunk = (static_cast<int64_t>(head) * sizes.chunks + place.at) * chunk * chunk;
        const int64_t of_tokens = static_cast<int64_t>(head) * sizes.tokens + first;
        copy_tile<chunk, chunk>(of_head.solve, narrow, from.prepared.solve + of_chunk, chunk, thread);
        if (thread < chunk) {
            const int which = thread / (chunk / 4), i = thread % (chunk / 4) * 4;
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

}  // namespace surogate::delta
