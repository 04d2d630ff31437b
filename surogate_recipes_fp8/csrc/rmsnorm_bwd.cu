// n[t, c] = x[t, c] * rstd[t],  g = dy * w:
//   fp8_rmsnorm_bwd    dx [T, C] = rstd * (g - n * mean_c(g * n)) (+ dresidual), in bf16;  dw [C] (+)= sum_t dy * n
//                      q [T, C]: dx in FP8;  q_t [C, T]: q transposed
//   fp8_rmsnorm_dgrad  without dw
//
// dy, x, w, dresidual, dx are bf16; rstd is fp32; dw is fp32 (written or accumulated into) or bf16 (written). dresidual
// and q_t are optional. dx may be the same buffer as dy or dresidual. T and C are multiples of 16, C at most 16384;
// tensors are aligned to 16 bytes. Scales and amax: scale.h.
//
// The arithmetic of dx is that of the bf16 kernels in the same order, so its bits are the same (rmsnorm_bwd.cu of
// surogate-recipe-bf16). Those of dw are not, because a block has other rows.
//
// Grid: a block per 32 rows (norm_rows.cuh), with dw at most 512 blocks, independent of the GPU. Up to 1024 columns, 8
// or 16 warps have a row each; otherwise groups of at least 96 threads. A thread loads all its octets of a row before it
// uses them, and keeps its columns of dw in registers over all rows; it loads those of w twice a row, because registers
// for them too would spill. A block adds the dw of its groups in order and writes one partial row; another launch adds the
// partial rows in a fixed order. With current scaling, fallback scaling without an initialised scale, and rows that do not
// fit in shared memory, this launch measures, and another quantizes dx.
//
// Bytes moved per element: 6 read + 2 + 1 + 1 written (4 + 4 without dresidual). Floor at 4.26 TB/s: 8,192 x 4,096 79 us.
// Measured on an H200, alone: 65 to 90 % of bandwidth, depending on the shape. The partial rows add 8 bytes per column
// and block, 2.5 % of the bytes at T = 8192.
#include <surogate/rmsnorm_dx.cuh>
#include <surogate/shared_memory.h>
#include <surogate/sum_partials.cuh>

#include "norm_rows.cuh"
#include "norms.h"
#include "quantize.cuh"

namespace surogate {
namespace {

constexpr int64_t kMaxBlocks = 512;  // with dw

struct Buffers {
    const __nv_bfloat16 *dy, *x, *w, *dresidual;
    const float* rstd;
    __nv_bfloat16* dx;
    float* partials;   // null: no dw
    uint8_t *q, *q_t;  // q is null if this launch does not quantize
    float* amax;       // to raise, may be null
    int64_t rows;
    int columns, tile_rows;
};

// Adds the dw of the groups of a block in order, and writes the sum as a partial row. `total`: C floats of shared memory,
// the first halves of all octets before the second halves, so that adjacent threads access adjacent words.
template <int Held, bool WarpRow>
__device__ __forceinline__ void write_partial(const float (&dw)[Held][8], float4* total, float* partial, int columns,
                                              const RowGroup<WarpRow>& group) {
    for (int turn = 0; turn < group.count; ++turn) {
        __syncthreads();
        if (group.index == turn) {
#pragma unroll
            for (int k = 0; k < Held; ++k) {
                const int i = group.lane + k * group.lanes;
                if (i < columns / 8) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float* mine = dw[k] + 4 * half;
                        float4 &to = total[half * (columns / 8) + i], sum = make_float4(mine[0], mine[1], mine[2], mine[3]);
                        if (turn != 0) {
                            sum = make_float4(to.x + sum.x, to.y + sum.y, to.z + sum.z, to.w + sum.w);
                        }
                        to = sum;
                    }
                }
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < columns / 4; i += blockDim.x) {
        reinterpret_cast<float4*>(partial)[i] = total[i % 2 * (columns / 8) + i / 2];
    }
}

// Held: number of octets of a row that a thread keeps in registers. A thread has the same columns in every row.
// Full: each thread has as many. Branches around single octets cost up to 7 % of the time.
template <int Held, bool WarpRow, bool HasDw, bool Full>
__global__ void __launch_bounds__(512)
    norm_bwd_kernel(const Buffers b, const Scale scale, int lanes) {
    extern __shared__ __align__(16) uint8_t bytes[];
    __shared__ typename RowSums<WarpRow>::Scratch scratch;
    __shared__ uint32_t tops[32];
    const RowGroup<WarpRow> group(lanes);
    const RowTile tile{bytes, b.columns};
    RowSums<WarpRow> sums(scratch, group);
    const int octets = b.columns / 8;
    const float encode = b.q != nullptr ? encode_of<E5M2>(scale) : 1.0f;
    AbsMax top;

    float dw[HasDw ? Held : 1][8] = {};
    const auto exists = [&](int k) { return Full || group.lane + k * group.lanes < octets; };
    const auto weight = [&](int k) { return Octet::load(b.w + (group.lane + k * group.lanes) * 8); };
    const int64_t stride = static_cast<int64_t>(gridDim.x) * b.tile_rows;
    for (int64_t first_row = static_cast<int64_t>(blockIdx.x) * b.tile_rows; first_row < b.rows; first_row += stride) {
        const int rows = static_cast<int>(min(static_cast<int64_t>(b.tile_rows), b.rows - first_row));
        for (int r = group.index; r < rows; r += group.count) {
            const int64_t start = (first_row + r) * b.columns + group.lane * 8;
            const float rstd = b.rstd[first_row + r];
            Octet dys[Held], xs[Held], rest[Held];
#pragma unroll
            for (int k = 0; k < Held; ++k) {
                if (exists(k)) {
                    dys[k] = Octet::load(b.dy + start + k * group.lanes * 8);
                    xs[k] = Octet::load(b.x + start + k * group.lanes * 8);
                    if (b.dresidual != nullptr) {
                        rest[k] = Octet::load(b.dresidual + start + k * group.lanes * 8);
                    }
                }
            }
            float dot = 0;
#pragma unroll
            for (int k = 0; k < Held; ++k) {
                if (exists(k)) {
                    float d[8], v[8], w[8];
                    dys[k].to_float(d);
                    xs[k].to_float(v);
                    weight(k).to_float(w);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const NormElement element{d[i], w[i], v[i], rstd};
                        dot = element.add_to(dot);
                        if constexpr (HasDw) {
                            dw[k][i] += d[i] * element.normed();
                        }
                    }
                }
            }
            dot = sums.in_order(dot) / b.columns;
#pragma unroll
            for (int k = 0; k < Held; ++k) {
                if (exists(k)) {
                    float d[8], v[8], w[8];
                    dys[k].to_float(d);
                    xs[k].to_float(v);
                    weight(k).to_float(w);
                    float other[8] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
                    if (b.dresidual != nullptr) {
                        rest[k].to_float(other);
                    }
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        d[i] = NormElement{d[i], w[i], v[i], rstd}.dx(dot, other[i]);
                    }
                    Octet dx = Octet::from_float(d);
                    dx.store(b.dx + start + k * group.lanes * 8);
                    if (b.amax != nullptr) {
                        top.add(dx);
                    }
                    if (b.q != nullptr) {
                        uint32_t words[2];
                        dx.to_float(d);
                        quantize<E5M2>(d, encode, words);
                        *reinterpret_cast<uint2*>(b.q + start + k * group.lanes * 8) = make_uint2(words[0], words[1]);
                        if (b.q_t != nullptr) {
                            *reinterpret_cast<uint2*>(tile.at(r, (group.lane + k * group.lanes) * 8)) =
                                make_uint2(words[0], words[1]);
                        }
                    }
                }
            }
        }
        if (b.q_t != nullptr) {
            __syncthreads();
            tile.write(b.q_t, first_row, b.rows, b.tile_rows);
            __syncthreads();
        }
    }
    if (b.amax != nullptr) {
        top.stage(tops);
        __syncthreads();
        AbsMax::raise(tops, b.amax);
    }
    if constexpr (HasDw) {
        write_partial(dw, reinterpret_cast<float4*>(bytes), b.partials + static_cast<int64_t>(blockIdx.x) * b.columns,
                      b.columns, group);
    }
}

// Enqueues the kernel and returns the number of its blocks, which is that of the partial rows.
template <bool HasDw>
int64_t launch(const Buffers& b, const Scale& scale, const char* op, cudaStream_t stream) {
    const int octets = b.columns / 8;
    const int64_t tiles = ceil_div(b.rows, b.tile_rows), blocks = HasDw ? std::min(kMaxBlocks, tiles) : tiles;
    const int64_t tile_bytes = b.q_t == nullptr ? 0 : RowTile::size(b.tile_rows, b.columns);
    const int64_t shared = std::max<int64_t>(tile_bytes, HasDw ? 4 * b.columns : 0);
    const auto run = [&](auto full, auto other, int held, int lanes) {
        const auto kernel = octets == held * lanes ? full : other;
        allow_shared_memory(kernel, static_cast<int>(shared), op);
        const int threads = (lanes == 32 ? row_warps(blocks) * 32 : 512) / lanes * lanes;
        kernel<<<to_int(blocks, op, "rows"), threads, shared, stream>>>(b, scale, lanes);
        check_launch(op);
    };
    if (octets <= 128) {
        run(norm_bwd_kernel<4, true, HasDw, true>, norm_bwd_kernel<4, true, HasDw, false>, 4, 32);
    } else if (octets <= 256) {
        run(norm_bwd_kernel<2, false, HasDw, true>, norm_bwd_kernel<2, false, HasDw, false>, 2, 128);
    } else {
        run(norm_bwd_kernel<4, false, HasDw, true>, norm_bwd_kernel<4, false, HasDw, false>, 4,
            static_cast<int>(ceil_div(ceil_div(octets, 4), 32) * 32));
    }
    return blocks;
}

void check(const RmsNormBwd& t, Extent size, const char* op) {
    check_tiles(size.rows, size.columns, op);
    SUROGATE_REQUIRE(size.columns <= 16384, op, "columns must not exceed 16384, got " + std::to_string(size.columns));
    check_pointer(t.dy, op, "dy", 16);
    check_pointer(t.x, op, "x", 16);
    check_pointer(t.w, op, "w", 16);
    check_pointer(t.rstd, op, "rstd", 4);
    check_pointer(t.dx, op, "dx", 16);
    check_pointer(t.q, op, "q", 16);
    SUROGATE_REQUIRE(is_aligned(t.dresidual, 16), op, "dresidual must be aligned to 16 bytes");
    SUROGATE_REQUIRE(is_aligned(t.q_t, 16), op, "q_t must be aligned to 16 bytes");
    if (t.dw != nullptr) {
        const int64_t needed = std::min(ceil_div(size.rows, 16), kMaxBlocks) * size.columns * 4;
        check_pointer(t.dw, op, "dw", bytes_of(t.dtype_dw));
        check_pointer(t.workspace, op, "workspace", 16);
        SUROGATE_REQUIRE(t.workspace_bytes >= needed, op,
                         "workspace needs " + std::to_string(needed) + " bytes, got " + std::to_string(t.workspace_bytes));
    }
}

}  // namespace

void fp8_rmsnorm_bwd(const RmsNormBwd& t, Extent size, int format, const Scale& scale, cudaStream_t stream) {
    const char* op = t.dw != nullptr ? "fp8_rmsnorm_bwd" : "fp8_rmsnorm_dgrad";
    check(t, size, op);
    check_scale(scale, op);
    require_format(format, E5M2, op);
    Buffers b{static_cast<const __nv_bfloat16*>(t.dy),
              static_cast<const __nv_bfloat16*>(t.x),
              static_cast<const __nv_bfloat16*>(t.w),
              static_cast<const __nv_bfloat16*>(t.dresidual),
              static_cast<const float*>(t.rstd),
              static_cast<__nv_bfloat16*>(t.dx),
              t.dw != nullptr ? static_cast<float*>(t.workspace) : nullptr,
              static_cast<uint8_t*>(t.q),
              static_cast<uint8_t*>(t.q_t),
              scale.scaling == kDelayed ? scale.amax : nullptr,
              size.rows,
              to_int(size.columns, op, "columns"),
              32};
    const int fitting = t.q_t == nullptr ? 32 : tile_rows_for(size.columns, op);
    const bool at_once = !scale.measures() && fitting != 0;
    if (at_once) {
        b.tile_rows = fitting;
    } else {
        b.q = b.q_t = nullptr;
        b.amax = scale.measures() ? scale.measured : nullptr;
    }
    if (scale.measures()) {
        check_cuda(cudaMemsetAsync(scale.measured, 0, 8, stream), op);
    }
    const int64_t partials = t.dw != nullptr ? launch<true>(b, scale, op, stream) : launch<false>(b, scale, op, stream);
    if (!at_once) {
        const Quantized to{static_cast<uint8_t*>(t.q), static_cast<uint8_t*>(t.q_t)};
        launch_quantize<E5M2>(Bf16Source{b.dx, size.columns}, to, scale, size.rows, size.columns, op, stream);
    }
    if (t.dw != nullptr) {
        sum_partials(b.partials, partials, size.columns, t.dw, t.accumulate_dw, t.dtype_dw, op, stream);
    }
}

}  // namespace surogate
