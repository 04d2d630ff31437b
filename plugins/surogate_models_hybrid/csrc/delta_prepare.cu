// What each chunk of the gated delta rule needs that does not depend on the state: see delta.h and `Prepared`.
//
// Grid: a block computes a chunk of a key head, for two of its value heads at a time. Four warps compute K K^T and Q K^T, 16
// rows each. Then 64 threads have a value head: the inverses of the four blocks of 16 x 16 on the diagonal of I + L, each
// thread a column by substitution in fp32; of two of 32 x 32 and of the whole by products,
// (A, 0; B, C)^-1 = (A^-1, 0; -C^-1 B A^-1, C^-1), with operands of 11 bits (tf32) and sums in fp32.
//
// Bytes, 16/32 heads: q, k read and written 8 KiB a token each, two matrices of 4 KiB. 8,192 tokens: 200 MB, 42 us at 4.8 TB/s.

#include <cmath>

#include "delta_tile.cuh"

namespace surogate::delta {
namespace {

constexpr int threads = 128, heads_at_once = 2;
constexpr int system_row = chunk + 4;  // begins at a multiple of 16 bytes, and rows that are read at once share no banks

struct Shared {
    union {
        struct {
            T q[chunk * wide], k[chunk * wide];
        };
        float system[heads_at_once][chunk * system_row];  // L, then the inverse of I + L
    };
    float decay[heads_at_once][chunk], beta[heads_at_once][chunk];
    int document[chunk];
};

// Norms 64 rows: x / sqrt(sum x^2 + 1e-6), times `scale`, in the order of `Prepared`. A warp takes every fourth row.
__device__ __forceinline__ void norm_rows(const T* from, int64_t from_row, T* tile, T* to, float scale) {
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int place = place_of(4 * lane);
    constexpr int at_once = 8;
    for (int begin = warp; begin < chunk; begin += at_once * threads / 32) {
        uint2 words[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            words[i] = *reinterpret_cast<const uint2*>(from + (begin + i * threads / 32) * from_row + 4 * lane);
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int r = begin + i * threads / 32;
            const float2 a = unpack(words[i].x), b = unpack(words[i].y);
            const float factor = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) + 1e-6f) * scale;
            const uint32_t low = pack(a.x * factor, a.y * factor), high = pack(b.x * factor, b.y * factor);
            *reinterpret_cast<uint32_t*>(tile + r * wide + place) = low;
            *reinterpret_cast<uint32_t*>(tile + r * wide + place + 8) = high;
            *reinterpret_cast<uint32_t*>(to + r * dim + place) = low;
            *reinterpret_cast<uint32_t*>(to + r * dim + place + 8) = high;
        }
    }
}

__device__ __forceinline__ uint32_t rounded(float x) {
    uint32_t out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(x));
    return out;
}

// sums [16, 8 N] += a [16, 8 K] b [8 K, 8 N], of rows of `system_row` floats.
template <int N, int K>
__device__ __forceinline__ void add_product(float (&sums)[N][4], const float* a, const float* b) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < 8 * K; k += 8) {
        const float* row = a + g * system_row + k + t;
        const uint32_t left[4] = {rounded(row[0]), rounded(row[8 * system_row]), rounded(row[4]),
                                  rounded(row[8 * system_row + 4])};
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float* column = b + (k + t) * system_row + 8 * n + g;
            const uint32_t right[2] = {rounded(column[0]), rounded(column[4 * system_row])};
            asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                         "{%0, %1, %2, %3};"
                         : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
                         : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
        }
    }
}

template <int N>
__device__ __forceinline__ void store_sums(const float (&sums)[N][4], float* to, float factor) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float* at = to + g * system_row + 8 * n + 2 * t;
        *reinterpret_cast<float2*>(at) = {factor * sums[n][0], factor * sums[n][1]};
        *reinterpret_cast<float2*>(at + 8 * system_row) = {factor * sums[n][2], factor * sums[n][3]};
    }
}

// Replaces L [64, 64] by the inverse of I + L. All threads of the block call it, two warps for each system.
__device__ __forceinline__ void invert(float* system, int warp_of_system) {
    const int lane = threadIdx.x % 32;
    {
        const int column = lane % 16, begin = 16 * (2 * warp_of_system + lane / 16);
        float* block = system + begin * system_row + begin;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sums[2] = {i == column ? 1.0f : 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < i; ++j) {
                sums[j % 2] -= block[i * system_row + j] * x[j];
            }
            x[i] = sums[0] + sums[1];
        }
        __syncwarp();  // all columns have read the block
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            block[i * system_row + column] = x[i];
        }
    }
    __syncwarp();
    {  // of 32 x 32: a warp has the one of which it has inverted both blocks
        float* block = system + 32 * warp_of_system * (system_row + 1);
        float* below = block + 16 * system_row;
        float sums[2][4];
        clear(sums);
        add_product<2, 2>(sums, below, block);
        __syncwarp();
        store_sums(sums, below, 1.0f);
        __syncwarp();
        clear(sums);
        add_product<2, 2>(sums, below + 16, below);
        __syncwarp();
        store_sums(sums, below, -1.0f);
    }
    __syncthreads();
    float* below = system + 32 * system_row;
    float* rows = below + 16 * warp_of_system * system_row;
    float sums[4][4];
    clear(sums);
    add_product<4, 4>(sums, rows, system);
    __syncwarp();
    store_sums(sums, rows, 1.0f);
    __syncthreads();
    clear(sums);
    add_product<4, 4>(sums, rows + 32, below);
    __syncthreads();  // both warps have read all rows
    store_sums(sums, rows, -1.0f);
    __syncthreads();
}

__global__ void __launch_bounds__(threads, 4) prepare_kernel(Inputs inputs, Prepared prepared, Sizes sizes) {
    extern __shared__ __align__(16) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int at = blockIdx.x, key_head = blockIdx.y, first = at * chunk;
    const int rows = 16 * ((warp + at) % 4);  // those of more tiles below the diagonal are of another warp in the next chunk
    const T* queries = inputs.qkv + first * sizes.qkv_row() + key_head * dim;
    const int64_t of_keys = (static_cast<int64_t>(key_head) * sizes.tokens + first) * dim;
    norm_rows(queries, sizes.qkv_row(), shared.q, prepared.q + of_keys, rsqrtf(static_cast<float>(dim)));
    norm_rows(queries + static_cast<int64_t>(sizes.k_heads) * dim, sizes.qkv_row(), shared.k, prepared.k + of_keys, 1.0f);
    if (warp == 0) {
        const int positions[2] = {inputs.positions[first + lane], inputs.positions[first + 32 + lane]};
        count_documents(shared.document, positions);
    }
    __syncthreads();

    float keys_keys[chunk / 8][4], queries_keys[chunk / 8][4];
    clear(keys_keys);
    clear(queries_keys);
#pragma unroll
    for (int k = 0; k < dim; k += 16) {
        uint32_t a[4], q[4];
        load_a(a, shared.k, wide, rows, k);
        load_a(q, shared.q, wide, rows, k);
#pragma unroll
        for (int n = 0; n < chunk / 16; ++n) {
            if (16 * n <= rows) {
                uint32_t b[4];
                load_b(b, shared.k, wide, 16 * n, k);
                add_pair(keys_keys[2 * n], keys_keys[2 * n + 1], a, b);
                add_pair(queries_keys[2 * n], queries_keys[2 * n + 1], q, b);
            }
        }
    }

    for (int begin = 0; begin < sizes.share; begin += heads_at_once) {
        const int heads = min(heads_at_once, sizes.share - begin);
        __syncthreads();  // nobody reads q and k, or the last systems
        if (warp < heads) {
            const int head = key_head * sizes.share + begin + warp;
            const float a_log = inputs.a_log[head], dt_bias = inputs.dt_bias[head];
            float total = 0.0f, decay[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = half * 32 + lane, document = shared.document[i];
                const T* row = inputs.ba + static_cast<int64_t>(first + i) * 2 * sizes.v_heads;
                float sum = decay_of(__bfloat162float(row[sizes.v_heads + head]), a_log, dt_bias).g;
#pragma unroll
                for (int offset = 1; offset < 32; offset *= 2) {  // of the tokens of the document alone
                    const float other = __shfl_up_sync(full_warp, sum, offset);
                    const int of_other = __shfl_up_sync(full_warp, document, offset);
                    sum += lane >= offset && document == of_other ? other : 0.0f;
                }
                decay[half] = half == 1 && document == shared.document[31] ? total + sum : sum;
                total = __shfl_sync(full_warp, decay[half], 31);
                shared.decay[warp][i] = decay[half];
                shared.beta[warp][i] = 1.0f / (1.0f + expf(-__bfloat162float(row[head])));
            }
            const int last = shared.document[chunk - 1];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = half * 32 + lane, document = shared.document[i];
                const int64_t to = static_cast<int64_t>(head) * sizes.tokens + first + i;
                prepared.decay[to] = decay[half];
                prepared.beta[to] = shared.beta[warp][i];
                prepared.reads[to] = document == 0 ? expf(decay[half]) : 0.0f;
                prepared.left[to] = document == last ? expf(total - decay[half]) : 0.0f;
            }
        }
        __syncthreads();
        for (int of_pass = 0; of_pass < heads; ++of_pass) {
            const int head = key_head * sizes.share + begin + of_pass;
            const float* decay = shared.decay[of_pass];
            T* scores = prepared.scores + (static_cast<int64_t>(head) * sizes.chunks + at) * chunk * chunk;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = rows + lane / 4 + 8 * half, document = shared.document[i];
                const float of_row = decay[i], beta = shared.beta[of_pass][i];
#pragma unroll
                for (int n = 0; n < chunk / 8; ++n) {
                    const int j = 8 * n + 2 * (lane % 4);
                    float below[2] = {0.0f, 0.0f};
                    if (8 * n < rows + 16) {  // else above the diagonal, where nobody reads the scores
                        const float2 of_columns = *reinterpret_cast<const float2*>(decay + j);
                        const bool seen[2] = {j <= i && document == shared.document[j],
                                              j + 1 <= i && document == shared.document[j + 1]};
                        // One exponential without a branch: that of minus infinity is 0.
                        const float between[2] = {expf(seen[0] ? of_row - of_columns.x : -INFINITY),
                                                  expf(seen[1] ? of_row - of_columns.y : -INFINITY)};
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            below[e] = j + e < i ? keys_keys[n][2 * half + e] * beta * between[e] : 0.0f;
                        }
                        *reinterpret_cast<uint32_t*>(scores + i * chunk + j) =
                            pack(queries_keys[n][2 * half] * between[0], queries_keys[n][2 * half + 1] * between[1]);
                    }
                    *reinterpret_cast<float2*>(shared.system[of_pass] + i * system_row + j) = {below[0], below[1]};
                }
            }
        }
        __syncthreads();
        // With one head left, the other two warps invert what the last pass has left there: nobody reads it.
        invert(shared.system[warp / 2], warp % 2);
        for (int word = threadIdx.x; word < heads * chunk * chunk / 8; word += threads) {
            const int of_pass = word / (chunk * chunk / 8), i = word / (chunk / 8) % chunk, j = word % (chunk / 8) * 8;
            const int head = key_head * sizes.share + begin + of_pass;
            T* solve = prepared.solve + (static_cast<int64_t>(head) * sizes.chunks + at) * chunk * chunk;
            const float* row = shared.system[of_pass] + i * system_row + j;
            const float4 low = *reinterpret_cast<const float4*>(row), high = *reinterpret_cast<const float4*>(row + 4);
            *reinterpret_cast<uint4*>(solve + i * chunk + j) = {pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y),
                                                                pack(high.z, high.w)};
        }
    }
}

// Lists the chunks in which a document begins. One block, in which a thread looks at a chunk.
__global__ void __launch_bounds__(1024) pieces_kernel(const int* positions, int* pieces, int chunks) {
    __shared__ int counts[32];
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int total = 0;
    for (int from = 0; from < chunks; from += 1024) {
        const int at = from + static_cast<int>(threadIdx.x);
        bool begins = at == 0;
        if (at < chunks) {
#pragma unroll 8
            for (int i = 0; i < chunk; i += 4) {
                const int4 four = *reinterpret_cast<const int4*>(positions + static_cast<int64_t>(at) * chunk + i);
                begins = begins || four.x == 0 || four.y == 0 || four.z == 0 || four.w == 0;
            }
        }
        const unsigned those = __ballot_sync(full_warp, begins);
        if (lane == 0) {
            counts[warp] = __popc(those);
        }
        __syncthreads();
        int before = total;
        for (int w = 0; w < 32; ++w) {
            before += w < warp ? counts[w] : 0;
            total += counts[w];
        }
        if (begins) {
            pieces[1 + before + __popc(those & ((1u << lane) - 1))] = at;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        pieces[0] = total;
    }
}

}  // namespace

void prepare(const Inputs& inputs, const Prepared& prepared, const Sizes& sizes, cudaStream_t stream) {
    constexpr auto op = "gated_delta_rule";
    pieces_kernel<<<1, 1024, 0, stream>>>(inputs.positions, prepared.pieces, sizes.chunks);
    check_launch(op);
    allow_shared_memory(prepare_kernel, sizeof(Shared), op);
    prepare_kernel<<<dim3(sizes.chunks, sizes.k_heads), threads, sizeof(Shared), stream>>>(inputs, prepared, sizes);
    check_launch(op);
}

}  // namespace surogate::delta
