// A stable counting sort of the slots t k + j by expert:
//
//   experts [S] int32, each 0 to E - 1  ->  order [S] int32, the slot of each row
//                                           place [S] int32, the row of each slot
//                                           ends  [E] int32, the end of the rows of each expert
//
// All pointers are aligned to 4 bytes; E is at most 512. Two kernels: the first counts the experts of each block's slots in
// the workspace [blocks,E], the second sums these counts to the first row of each block and expert, and places the slots.
// Ranks come from votes of a warp, so no order depends on time. There are 256 blocks at most, because each reads the counts
// of all. Bytes a slot: 8 read, 8 written; 131,072 slots: 2 MB, and 64 KB of counts to each of 128 blocks from the L2 cache.
// Two launches and their waits decide, about 10 us.
#include <cuda_runtime.h>

#include <string>

#include "routes.h"
#include "surogate/check.h"
#include "surogate/reduce.cuh"

namespace surogate {
namespace {

constexpr int most_blocks = 256;
// Threads of a block, of which each sums the counts of an expert: 256, or 512 of more experts. Slots of a block are a multiple of
// 4 Threads.

// Slots from `begin` to `end`, those of a warp of the block.
struct Slots {
    int64_t begin, end;

    template <int Threads>
    static __device__ __forceinline__ Slots of_warp(int64_t slots, int64_t of_block) {
        const int64_t of_warp = of_block / (Threads / 32);
        const int64_t begin = blockIdx.x * of_block + threadIdx.x / 32 * of_warp;
        return {begin, begin + of_warp < slots ? begin + of_warp : slots};
    }
};

// Calls use(slot, expert, lanes of the warp with that expert) for each slot of a lane. Other lanes take part without one.
template <class Use>
__device__ __forceinline__ void for_each_slot(const int32_t* experts, Slots slots, Use use) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int64_t first = slots.begin; first < slots.end; first += 32) {
        const int64_t slot = first + lane;
        const int expert = slot < slots.end ? experts[slot] : -1;
        const unsigned same = __match_any_sync(full_warp, expert);
        if (expert >= 0) {
            use(slot, expert, same);
        }
        __syncwarp();
    }
}

// counts[warp][e] of the block becomes the number of slots that the warp has for e.
template <int Threads>
__device__ __forceinline__ void count(const int32_t* experts, Slots slots, int (*counts)[Threads]) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    for (int w = 0; w < Threads / 32; ++w) {
        counts[w][threadIdx.x] = 0;
    }
    __syncthreads();
    for_each_slot(experts, slots, [&](int64_t, int expert, unsigned same) {
        if (lane == __ffs(same) - 1) {
            counts[warp][expert] += __popc(same);
        }
    });
    __syncthreads();
}

template <int Threads>
__global__ void __launch_bounds__(Threads)
    count_kernel(const int32_t* experts, int32_t* of_blocks, int64_t slots, int64_t of_block, int n_experts) {
    constexpr int warps = Threads / 32;
    __shared__ int counts[warps][Threads];
    count<Threads>(experts, Slots::of_warp<Threads>(slots, of_block), counts);
    const int e = static_cast<int>(threadIdx.x);
    if (e < n_experts) {
        int total = 0;
        for (int w = 0; w < warps; ++w) {
            total += counts[w][e];
        }
        of_blocks[static_cast<int64_t>(blockIdx.x) * n_experts + e] = total;
    }
}

template <int Threads>
__global__ void __launch_bounds__(Threads)
    place_kernel(const int32_t* experts, const int32_t* of_blocks, int32_t* order, int32_t* place, int32_t* ends,
                 int64_t slots, int64_t of_block, int n_experts) {
    constexpr int warps = Threads / 32;
    __shared__ int counts[warps][Threads];
    __shared__ int of_warps[warps];
    const Slots mine = Slots::of_warp<Threads>(slots, of_block);
    count<Threads>(experts, mine, counts);

    // Thread e: the rows of its expert in the blocks before, and in all.
    const int e = static_cast<int>(threadIdx.x), lane = e % 32, warp = e / 32;
    int before = 0, total = 0;
    if (e < n_experts) {
        for (unsigned block = 0; block < gridDim.x; ++block) {
            const int rows = of_blocks[static_cast<int64_t>(block) * n_experts + e];
            before += block < blockIdx.x ? rows : 0;
            total += rows;
        }
    }
    int end = total;  // sums over the experts up to e: of the warp, then of the block
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_sync(full_warp, end, lane >= distance ? lane - distance : 0);
        end += lane >= distance ? other : 0;
    }
    if (lane == 31) {
        of_warps[warp] = end;
    }
    __syncthreads();
    for (int w = 0; w < warp; ++w) {
        end += of_warps[w];
    }
    if (blockIdx.x == 0 && e < n_experts) {
        ends[e] = end;
    }
    int row = end - total + before;  // counts become the first row of each warp
    for (int w = 0; w < warps; ++w) {
        const int rows = counts[w][e];
        counts[w][e] = row;
        row += rows;
    }
    __syncthreads();

    for_each_slot(experts, mine, [&](int64_t slot, int expert, unsigned same) {
        const int at = counts[warp][expert] + __popc(same & ((1u << lane) - 1));
        order[at] = static_cast<int32_t>(slot);
        place[slot] = at;
        __syncwarp(same);
        if (lane == __ffs(same) - 1) {
            counts[warp][expert] += __popc(same);
        }
    });
}

template <int Threads>
void sort_slots(const int32_t* experts, int32_t* order, int32_t* place, int32_t* ends, int32_t* counts, int64_t slots,
                int n_experts, const char* op, cudaStream_t stream) {
    constexpr int64_t turn_slots = 4 * Threads;
    const int64_t of_block = turn_slots * ceil_div(slots, turn_slots * most_blocks);
    const unsigned blocks = static_cast<unsigned>(ceil_div(slots, of_block));
    count_kernel<Threads><<<blocks, Threads, 0, stream>>>(experts, counts, slots, of_block, n_experts);
    check_launch(op);
    place_kernel<Threads>
        <<<blocks, Threads, 0, stream>>>(experts, counts, order, place, ends, slots, of_block, n_experts);
    check_launch(op);
}

}  // namespace

void expert_order(const void* experts, void* order, void* place, void* ends, void* workspace, int64_t slots,
                  int64_t n_experts, cudaStream_t stream) {
    constexpr const char* op = "expert_order";
    check_positive(slots, op, "slots");
    to_int(slots, op, "slots");
    SUROGATE_REQUIRE(n_experts > 0 && n_experts <= 512, op, "experts must be 1 to 512, got " + std::to_string(n_experts));
    check_pointer(experts, op, "experts", 4);
    check_pointer(order, op, "order", 4);
    check_pointer(place, op, "place", 4);
    check_pointer(ends, op, "ends", 4);
    check_pointer(workspace, op, "workspace", 4);
    const auto sort = n_experts <= 256 ? sort_slots<256> : sort_slots<512>;
    sort(static_cast<const int32_t*>(experts), static_cast<int32_t*>(order), static_cast<int32_t*>(place),
         static_cast<int32_t*>(ends), static_cast<int32_t*>(workspace), slots, static_cast<int>(n_experts), op, stream);
}

}  // namespace surogate
