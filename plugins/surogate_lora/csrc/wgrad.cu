// lora_wgrad: the gradients of all A and B of a block, which are products over tokens with a thin operand:
//
//   g[c, r] = scale * sum over t of wide[t, c] * thin[t, r]      = or += to[c * column_stride + r * rank_stride]
//
// The gradient of B has wide = dy and thin = x A^T, that of A has wide = x and thin = dy B.
//
//   table      `strips` entries of 8 int64 words, see Strip, at most 32; then one of 5 words for each octet of ranks, see
//              Octet
//   wide, thin bf16, row-major, aligned to 16 bytes; strides, `columns` and ranks are multiples of 8
//   to         fp32 or bf16; only fp32 accumulates. No two octets write the same element.
//   workspace  fp32, (units + tiles - 1) * slot bytes, where slot = tile_columns * 8 * octets * 4
//   tiles      of all strips: ceil(columns / tile_columns) each
//   octets     the most that a strip has, up to 8
//   rows       tokens
//   units      blocks that share the rows of all tiles; at most tiles * ceil(rows / step_rows)
//
// Two launches. In the first, unit u takes an equal share of the steps of all tiles in order, a step being step_rows rows
// of a tile, so it ends one tile and begins another, without a pause in its copies. It writes a partial sum of each tile
// that it meets to slot u + tile. The second adds the slots of each tile in order of units. So bits depend on shapes only.
//
// Rows are read in pieces of 512 bytes: strips of 128 bytes, as wide matrices have rows 2 to 48 KB apart, reach only half
// of the bandwidth. Three stages of 17 KB in each of two blocks of a multiprocessor are in flight.
//
// Bytes: wide once, thin once a tile (from L2), partial sums written and read once. Rank 16 on all projections, 4,096
// tokens: 164 MB for a block of Qwen3-0.6B, 531 MB of Qwen3-8B: 39 and 127 us at 4.2 TB/s. The products,
// 16 to 48 ranks for each element of wide, would take about a fifth of that.
//
// On an H200, in a loop: 47 and 143 us. Without the cache policy 51 and 150, of which the first launch took 46 and 137.
// With one launch, in which the last unit of a tile adds its slots, 63 and 150 without the policy: all tiles end at about
// the same time, and few blocks then do what the second launch does with all.
#include "wgrad.h"

#include <cuda_bf16.h>

#include <string>

#include "surogate/check.h"
#include "surogate/dtype.h"
#include "surogate/shared_memory.h"

namespace surogate {
namespace {

constexpr const char* op = "lora_wgrad";
constexpr int tile_columns = 256;
constexpr int threads = tile_columns;  // a warp has 32 columns
constexpr int blocks_per_processor = 2;
constexpr int step_rows = 32;
constexpr int stages = 4;
constexpr int max_octets = 8;
constexpr int chunks = tile_columns / 8;  // of 16 bytes, in a row of a tile

struct Strip {
    const __nv_bfloat16* wide;
    const __nv_bfloat16* thin;
    int64_t wide_stride;  // elements from row to row
    int64_t thin_stride;
    int64_t columns;  // of wide
    int64_t octets;   // of ranks, which are columns of thin
    int64_t first_tile;
    int64_t first_octet;
};
constexpr int strip_words = 8;
static_assert(sizeof(Strip) == strip_words * sizeof(int64_t));

struct Octet {
    void* to;
    int64_t column_stride;
    int64_t rank_stride;
    int64_t kinds;  // dtype of to, accumulates << 8
    double scale;
};
static_assert(sizeof(Octet) == 5 * sizeof(int64_t));

constexpr int max_strips = 32;

// How units divide the steps of all tiles.
struct Division {
    int steps;  // of a tile
    int total;
    int units;

    __device__ int begin(int64_t unit) const { return static_cast<int>(total * unit / units); }
    __device__ int unit_of(int64_t step) const { return static_cast<int>(((step + 1) * units - 1) / total); }
};

// Called by whole warps.
__device__ __forceinline__ const Strip& strip_of(const Strip* table, int strips, int tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned at_or_before = __ballot_sync(~0u, lane < strips && table[lane].first_tile <= tile);
    return table[__popc(at_or_before) - 1];
}

// A cache policy for what is read once: L2 replaces it first, so partial sums stay.
__device__ __forceinline__ uint64_t once() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copies 16 bytes to shared memory without waiting, or writes zeros and reads nothing.
__device__ __forceinline__ void copy_or_zero(uint32_t to, const void* from, bool is_inside, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(is_inside ? 16 : 0), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_or_zero(uint32_t to, const void* from, bool is_inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Loads four 8 x 8 matrices from shared memory. Lane 8m + i gives the address of row i of matrix m, 16 bytes. Thread
// 4g + t receives in words[m] the elements (2t, g) and (2t + 1, g) of matrix m.
__device__ __forceinline__ void load_transposed(uint32_t (&words)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(row)
                 : "memory");
}

// d [16, 8] += a [16, 16] b [16, 8], sums in fp32. Thread 4g + t holds rows g (d[0], d[1]) and g + 8 (d[2], d[3]),
// columns 2t and 2t + 1, of d.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

constexpr int wide_bytes = step_rows * tile_columns * 2;

// Units of 16 bytes from row to row of thin in shared memory: odd, so that ldmatrix has no bank conflicts.
__host__ __device__ constexpr int thin_units(int octets) { return octets | 1; }

__host__ __device__ constexpr int stage_bytes(int octets) { return wide_bytes + step_rows * thin_units(octets) * 16; }

// float4s of a partial sum: one for each thread, 16 columns and octet
__host__ __device__ constexpr int slot_size(int octets) { return threads * 2 * octets; }

// Copies the steps of a unit to the stages in shared memory, one after the other, over the ends of tiles.
struct Copies {
    const Strip* table;
    int strips;
    Division division;
    int rows;
    uint32_t shared;
    int per_stage;  // bytes

    int next;  // step
    int end;
    int stage;

    // Of this tile. Threads copy the same chunk of every `row_step`th row.
    static constexpr int row_step = threads / chunks;
    const __nv_bfloat16* wide;  // chunk of this thread, in the first row of the next step
    const __nv_bfloat16* thin;  // first row of the next step
    int wide_stride;
    int thin_stride;
    int octets;
    int rows_left;  // for this thread; 0 without a chunk
    int all_rows_left;

    __device__ __forceinline__ void begin_tile() {
        const int tile = next / division.steps, row = next % division.steps * step_rows;
        const Strip& strip = strip_of(table, strips, tile);
        const int64_t column = (tile - strip.first_tile) * tile_columns + 8 * (threadIdx.x % chunks);
        wide_stride = static_cast<int>(strip.wide_stride);
        thin_stride = static_cast<int>(strip.thin_stride);
        wide = strip.wide + row * strip.wide_stride + column;
        thin = strip.thin + row * strip.thin_stride;
        octets = static_cast<int>(strip.octets);
        all_rows_left = rows - row;
        rows_left = column < strip.columns ? all_rows_left : 0;
    }

    __device__ __forceinline__ void copy_step() {
        const int thread = static_cast<int>(threadIdx.x), chunk = thread % chunks, first = thread / chunks;
        const uint32_t to = shared + stage * per_stage;
        const uint64_t policy = once();
#pragma unroll
        for (int i = 0; i < step_rows / row_step; ++i) {
            const int row = first + i * row_step;
            copy_or_zero(to + (row * chunks + (chunk ^ (row & 7))) * 16, wide + int64_t{row} * wide_stride,
                         row < rows_left, policy);
        }
        for (int i = thread; i < step_rows * octets; i += threads) {
            const int row = i / octets, octet = i % octets;
            copy_or_zero(to + wide_bytes + (row * thin_units(octets) + octet) * 16,
                         thin + int64_t{row} * thin_stride + 8 * octet, row < all_rows_left);
        }
    }

    // Always commits a group of copies, which is empty after the last step.
    __device__ __forceinline__ void start_next() {
        if (next < end) {
            copy_step();
            stage = stage + 1 == stages ? 0 : stage + 1;
            if (++next < end && next % division.steps == 0) {
                begin_tile();
            } else {
                wide += int64_t{step_rows} * wide_stride;
                thin += int64_t{step_rows} * thin_stride;
                rows_left -= step_rows;
                all_rows_left -= step_rows;
            }
        }
        commit_copies();
    }
};

// Sums of a tile: those of a thread are 2 x 2 elements in each of 2 groups of 16 columns and 2 * pairs octets of ranks.
template <int pairs>
struct Sums {
    float of[2][2 * pairs][4] = {};

    // Adds a step, which is in shared memory.
    __device__ __forceinline__ void add_step(uint32_t from, int thin_row) {
        const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
        const int matrix = lane / 8, matrix_row = lane % 8;
#pragma unroll
        for (int top = 0; top < step_rows; top += 16) {
            uint32_t b[pairs][4];
#pragma unroll
            for (int p = 0; p < pairs; ++p) {
                const int row = top + matrix % 2 * 8 + matrix_row;
                load_transposed(b[p], from + wide_bytes + row * thin_row + (2 * p + matrix / 2) * 16);
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                uint32_t a[4];
                const int row = top + matrix / 2 * 8 + matrix_row, at = warp * 4 + m * 2 + matrix % 2;
                load_transposed(a, from + (row * chunks + (at ^ (row & 7))) * 16);
#pragma unroll
                for (int p = 0; p < pairs; ++p) {
                    multiply_add(of[m][2 * p], a, b[p][0], b[p][1]);
                    multiply_add(of[m][2 * p + 1], a, b[p][2], b[p][3]);
                }
            }
        }
    }

    // A slot has `threads` float4s for each group of columns and octet.
    __device__ __forceinline__ void store(float4* slot, int octets) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int n = 0; n < 2 * pairs; ++n) {
                if (n < octets) {
                    const float(&x)[4] = of[m][n];
                    slot[(m * octets + n) * threads + threadIdx.x] = make_float4(x[0], x[1], x[2], x[3]);
                }
            }
        }
    }
};

// Multiplies `steps` steps of a tile.
template <int pairs>
__device__ __forceinline__ void multiply(Copies& copies, int octets, int steps, int& stage, float4* slot) {
    const int thin_row = thin_units(octets) * 16;
    Sums<pairs> sums;
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<stages - 2>();
        __syncthreads();  // all have copied this step, and none reads the stage that the next copies fill
        copies.start_next();
        sums.add_step(copies.shared + stage * copies.per_stage, thin_row);
        stage = stage + 1 == stages ? 0 : stage + 1;
    }
    sums.store(slot, octets);
}

__global__ void __launch_bounds__(threads, blocks_per_processor)
    lora_wgrad_kernel(const int64_t* table, int strips, Division division, int rows, int most_octets, float4* slots) {
    extern __shared__ __align__(128) unsigned char bytes[];
    __shared__ Strip strip_table[max_strips];
    for (int i = static_cast<int>(threadIdx.x); i < strips * strip_words; i += threads) {
        reinterpret_cast<int64_t*>(strip_table)[i] = table[i];
    }
    const int unit = static_cast<int>(blockIdx.x), end = division.begin(unit + 1);
    int step = division.begin(unit);
    Copies copies{strip_table, strips, division, rows, static_cast<uint32_t>(__cvta_generic_to_shared(bytes)),
                  stage_bytes(most_octets), step, end};
    __syncthreads();
    copies.begin_tile();
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) {
        copies.start_next();
    }
    int stage = 0;
    while (step < end) {
        const int tile = step / division.steps;
        const int count = min(end, (tile + 1) * division.steps) - step;
        const int octets = static_cast<int>(strip_of(strip_table, strips, tile).octets);
        float4* const slot = slots + int64_t{unit + tile} * slot_size(most_octets);
        switch ((octets + 1) / 2) {
            case 1:
                multiply<1>(copies, octets, count, stage, slot);
                break;
            case 2:
                multiply<2>(copies, octets, count, stage, slot);
                break;
            case 3:
                multiply<3>(copies, octets, count, stage, slot);
                break;
            default:
                multiply<4>(copies, octets, count, stage, slot);
        }
        step += count;
    }
}

// blockIdx.x: the tile; blockIdx.y: an octet and one of the two groups of 16 columns that a warp has.
__global__ void __launch_bounds__(threads)
    lora_wgrad_sum_kernel(const int64_t* table, int strips, Division division, int most_octets, const float4* slots) {
    const auto* strip_table = reinterpret_cast<const Strip*>(table);
    const int tile = static_cast<int>(blockIdx.x), index = static_cast<int>(blockIdx.y) / 2;
    const int group = static_cast<int>(blockIdx.y) % 2;
    const Strip strip = strip_of(strip_table, strips, tile);
    if (index >= strip.octets) {
        return;
    }
    const Octet octet = reinterpret_cast<const Octet*>(table + strips * strip_words)[strip.first_octet + index];
    const bool adds = octet.kinds >> 8, is_wide = (octet.kinds & 255) == FP32;
    const float scale = static_cast<float>(octet.scale);
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t column = (tile - strip.first_tile) * tile_columns + warp * 32 + group * 16 + lane / 4;
    bool is_inside[4];
    int64_t place[4];
    float before[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int64_t at = column + j / 2 * 8, rank = lane % 4 * 2 + j % 2;
        is_inside[j] = at < strip.columns;
        place[j] = at * octet.column_stride + rank * octet.rank_stride;
        if (adds && is_inside[j]) {
            before[j] = static_cast<const float*>(octet.to)[place[j]];
        }
    }

    const int64_t first_step = int64_t{tile} * division.steps;
    const int first = division.unit_of(first_step), last = division.unit_of(first_step + division.steps - 1);
    const int64_t slot = slot_size(most_octets);
    const float4* from = slots + (first + tile) * slot + (group * strip.octets + index) * threads + threadIdx.x;
    float sum[4] = {};
    constexpr int at_once = 4;  // loads
    for (int left = last - first + 1; left > 0; left -= at_once, from += at_once * slot) {
        float4 terms[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            terms[i] = i < left ? from[i * slot] : float4{};
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            sum[0] += terms[i].x;
            sum[1] += terms[i].y;
            sum[2] += terms[i].z;
            sum[3] += terms[i].w;
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float value = __fmul_rn(scale, sum[j]);
        if (is_inside[j] && is_wide) {
            static_cast<float*>(octet.to)[place[j]] = adds ? __fadd_rn(before[j], value) : value;
        } else if (is_inside[j]) {
            static_cast<__nv_bfloat16*>(octet.to)[place[j]] = __float2bfloat16_rn(value);
        }
    }
}

}  // namespace

void lora_wgrad(const void* table, void* workspace, int64_t workspace_bytes, int64_t strips, int64_t tiles,
                int64_t octets, int64_t rows, int64_t units, cudaStream_t stream) {
    check_pointer(table, op, "table", 8);
    check_pointer(workspace, op, "workspace", 16);
    SUROGATE_REQUIRE(strips > 0 && strips <= max_strips, op, "strips must be 1 to 32, got " + std::to_string(strips));
    check_positive(tiles, op, "tiles");
    SUROGATE_REQUIRE(octets > 0 && octets <= max_octets, op, "octets must be 1 to 8, got " + std::to_string(octets));
    check_positive(rows, op, "rows");
    check_positive(units, op, "units");
    const int64_t steps = ceil_div(rows, step_rows);
    const Division division{to_int(steps, op, "rows"), to_int(steps * tiles, op, "rows * tiles"),
                            to_int(units, op, "units")};
    SUROGATE_REQUIRE(units <= division.total, op,
                     "units must be at most " + std::to_string(division.total) + ", got " + std::to_string(units));
    const int most_octets = static_cast<int>(octets);
    const int64_t needed = (units + tiles - 1) * slot_size(most_octets) * int64_t{sizeof(float4)};
    SUROGATE_REQUIRE(workspace_bytes >= needed, op,
                     "workspace must have " + std::to_string(needed) + " bytes, got " + std::to_string(workspace_bytes));
    // ldmatrix reads an octet beyond an odd number of them, also in the last row.
    const int shared = to_int(stages * stage_bytes(most_octets) + 16, op, "shared memory");
    allow_shared_memory(lora_wgrad_kernel, shared, op);
    const auto* words = static_cast<const int64_t*>(table);
    const int count = static_cast<int>(strips);
    auto* slots = static_cast<float4*>(workspace);
    lora_wgrad_kernel<<<division.units, threads, shared, stream>>>(words, count, division, to_int(rows, op, "rows"),
                                                                   most_octets, slots);
    check_launch(op);
    const dim3 grid(to_int(tiles, op, "tiles"), 2 * most_octets);
    lora_wgrad_sum_kernel<<<grid, threads, 0, stream>>>(words, count, division, most_octets, slots);
    check_launch(op);
}

}  // namespace surogate
