// embedding_bwd: dw [V, C] (+)= sum over the positions t with tokens[t] == v of dout[t, c]
//
// dout [T, C] is fp32 or bf16, tokens int32 [T], both row-major. dw is fp32 (written or accumulated into) or bf16
// (written). When dw is written, rows without a token are set to zero; when it is accumulated into, they are unchanged.
// Sums are fp32 and rounded once. Tokens outside of [0, V) are ignored. Pointers are aligned to their element. Accesses
// are vectorized if dout and dw are aligned to 16 bytes and C is a multiple of 8 (fp32: 4).
//
// There are no atomics. (token, position) pairs are sorted by token; cub::DeviceRadixSort is stable, so equal tokens
// stay in order of position. Grid: one block per pair and 32 vectors of columns. The block of the first pair of a token
// sums the token's rows: each of its 8 warps sums an eighth of the positions in ascending order, then the eight sums
// are added in order. The other blocks exit. Results depend only on the inputs.
//
// Workspace, aligned to 256 bytes: 4 int32 arrays of T elements (each rounded up to 256 bytes), then the temporary
// storage of the sort, at most 9 T + 16384 bytes. The launcher checks this bound: the sort of this version of CUB needs
// 8 KiB of bins, 1 KiB per tile of at least 1024 pairs, and another copy of the pairs.
//
// Bytes moved: dout once; rows of dw with a token once (twice when accumulating); without `accumulate`, all of dw once,
// which dominates: 622 MB for 151936 x 1024 in fp32. Expected: 60 % of bandwidth for the sums, 85 % for the zeros.
#include <cub/device/device_radix_sort.cuh>
#include <surogate/dispatch.cuh>
#include <surogate/workspace.h>

#include "elementwise.h"

namespace surogate {
namespace {

constexpr int kWarps = 8;

// Writes the pairs to sort. Tokens outside of [0, V) become V, which sorts last and is ignored.
__global__ void pairs_kernel(const int32_t* tokens, uint32_t* keys, int32_t* positions, int n, int64_t vocab_size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const int64_t token = tokens[i];
        keys[i] = static_cast<uint32_t>(token >= 0 && token < vocab_size ? token : vocab_size);
        positions[i] = i;
    }
}

// Returns the end (exclusive) of the run of equal keys that begins at `first`. Searches with steps that double and then
// halve.
__device__ __forceinline__ int run_end(const uint32_t* keys, int first, int n) {
    const uint32_t key = keys[first];
    int known = first;  // keys[known] == key
    int64_t step = 1;
    while (known + step < n && keys[known + step] == key) {
        known += static_cast<int>(step);
        step *= 2;
    }
    for (; step > 0; step /= 2) {
        if (known + step < n && keys[known + step] == key) {
            known += static_cast<int>(step);
        }
    }
    return known + 1;
}

template <class T, class Out, int N>
__global__ void __launch_bounds__(32 * kWarps)
    runs_kernel(const T* dout, const uint32_t* keys, const int32_t* positions, Out* dw, int n, int64_t vocab_size,
                int64_t columns, bool accumulate) {
    constexpr int tile = 32 * N;
    __shared__ float sums[kWarps][tile];
    const int first = blockIdx.x;
    const uint32_t key = keys[first];
    if (key >= vocab_size || (first > 0 && keys[first - 1] == key)) {
        return;  // uniform over the block
    }
    const int end = run_end(keys, first, n);
    const int share = (end - first + kWarps - 1) / kWarps;
    const int used = (end - first + share - 1) / share;  // number of warps with a non-empty share, at least one
    const int begin = first + threadIdx.y * share;
    const int stop = min(begin + share, end);
    const int64_t tile_start = static_cast<int64_t>(blockIdx.y) * tile;
    const int64_t column = tile_start + threadIdx.x * N;
    float sum[N] = {};
    if (column < columns) {
#pragma unroll 4
        for (int i = begin; i < stop; ++i) {
            float d[N];
            Vec<T, N>::load(dout + positions[i] * columns + column).to_float(d);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sum[j] += d[j];
            }
        }
    }
    if (used > 1) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            sums[threadIdx.y][threadIdx.x * N + j] = sum[j];
        }
        __syncthreads();
    }
    if (threadIdx.y > 0 || column >= columns) {
        return;
    }
    for (int w = 1; w < used; ++w) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            sum[j] += sums[w][threadIdx.x * N + j];
        }
    }
    Out* out = dw + static_cast<int64_t>(key) * columns + column;
    if (accumulate) {
        float before[N];
        Vec<Out, N>::load(out).to_float(before);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            sum[j] += before[j];
        }
    }
    Vec<Out, N>::from_float(sum).store(out);
}

int bits_of(int64_t largest) {
    int bits = 1;
    while (bits < 32 && (largest >> bits) != 0) {
        ++bits;
    }
    return bits;
}


}  // namespace

void embedding_bwd(const void* dout, const void* tokens, void* dw, void* workspace, int64_t workspace_bytes,
                   int64_t n_tokens, int64_t vocab_size, int64_t columns, bool accumulate, int dtype, int dtype_dw,
                   cudaStream_t stream) {
    constexpr const char* op = "embedding_bwd";
    check_positive(n_tokens, op, "n_tokens");
    check_positive(vocab_size, op, "vocab_size");
    check_positive(columns, op, "columns");
    to_int(vocab_size, op, "vocab_size");
    const int n = to_int(n_tokens, op, "n_tokens");
    check_pointer(dout, op, "dout", bytes_of(dtype));
    check_pointer(tokens, op, "tokens", 4);
    check_pointer(dw, op, "dw", bytes_of(dtype_dw));
    check_pointer(workspace, op, "workspace", workspace_alignment);
    check_accumulate(accumulate, dtype_dw, op);

    const int64_t array = aligned(n_tokens * 4);
    char* const base = static_cast<char*>(workspace);
    auto* const keys_in = reinterpret_cast<uint32_t*>(base);
    auto* const positions_in = reinterpret_cast<int32_t*>(base + array);
    auto* const keys = reinterpret_cast<uint32_t*>(base + 2 * array);
    auto* const positions = reinterpret_cast<int32_t*>(base + 3 * array);
    const auto sort = [&](void* temporary, size_t& bytes) {
        check_cuda(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys_in, keys, positions_in, positions, n, 0,
                                                   bits_of(vocab_size), stream),
                   op);
    };
    size_t sort_bytes = 0;
    sort(nullptr, sort_bytes);  // only queries the size
    const int64_t needed = 4 * array + static_cast<int64_t>(sort_bytes);
    SUROGATE_REQUIRE(workspace_bytes >= needed, op,
                     "workspace needs " + std::to_string(needed) + " bytes, got " + std::to_string(workspace_bytes));

    if (!accumulate) {
        check_cuda(cudaMemsetAsync(dw, 0, static_cast<size_t>(vocab_size * columns * bytes_of(dtype_dw)), stream), op);
    }
    pairs_kernel<<<static_cast<unsigned>(ceil_div(n, 256)), 256, 0, stream>>>(static_cast<const int32_t*>(tokens),
                                                                              keys_in, positions_in, n, vocab_size);
    check_launch(op);
    sort(base + 4 * array, sort_bytes);
    with_float_type(dtype, op, "dout", [&](auto in) {
        with_float_type(dtype_dw, op, "dw", [&](auto to) {
            using T = typename decltype(in)::type;
            using Out = typename decltype(to)::type;
            constexpr int width = vector_width<T, Out>;
            const bool wide = columns % width == 0 && all_aligned({dout, dw});
            const int64_t tiles = ceil_div(columns, 32 * (wide ? width : 1));
            SUROGATE_REQUIRE(tiles <= 65535, op, "columns must be less, got " + std::to_string(columns));
            const auto kernel = wide ? runs_kernel<T, Out, width> : runs_kernel<T, Out, 1>;
            kernel<<<dim3(n, static_cast<unsigned>(tiles)), dim3(32, kWarps), 0, stream>>>(
                static_cast<const T*>(dout), keys, positions, static_cast<Out*>(dw), n, vocab_size, columns,
                accumulate);
        });
    });
    check_launch(op);
}

}  // namespace surogate
