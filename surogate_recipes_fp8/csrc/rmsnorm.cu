// fp8_rmsnorm      rstd [T] = 1 / sqrt(mean_c(x[t, c]^2) + eps);  norm [T, C] = (x * rstd) * w in bf16;
//                  q [T, C]: norm in FP8;  q_t [C, T]: q transposed
// fp8_add_rmsnorm  residual_out [T, C] = x + residual in bf16; the others of this rounded sum
//
// x, residual, w, norm, residual_out are bf16, rstd is fp32. norm and q_t are optional. residual_out may be the same
// buffer as residual. T and C are multiples of 16, C at most 32768; tensors are aligned to 16 bytes. Scales and amax:
// scale.h.
//
// The arithmetic of rstd, residual and norm is that of the bf16 kernels in the same order, so their bits are the same
// (rmsnorm.cu of surogate-recipe-bf16).
//
// Grid: a block per 32 rows (norm_rows.cuh). Up to 2048 columns, 8 or 16 warps have a row each; otherwise groups of at
// least 160 threads, which load the next row before they sum the present one. With current scaling, fallback scaling
// without an initialised scale, and rows that do not fit in shared memory, this launch writes residual_out and rstd, and
// measures; another quantizes (quantize.cuh), reading residual_out again.
//
// Bytes moved per element: 2 (x) + 1 + 1; add: 4 + 2 + 1 + 1. Floor at 4.26 TB/s: 8,192 x 4,096 with add 63 us.
// Measured on an H200, alone: 65 to 90 % of bandwidth, depending on the shape.
#include <surogate/shared_memory.h>

#include "norm_rows.cuh"
#include "norms.h"
#include "quantize.cuh"

namespace surogate {
namespace {

struct Buffers {
    const __nv_bfloat16 *x, *residual, *w;
    __nv_bfloat16 *norm, *residual_out;
    float* rstd;
    uint8_t *q, *q_t;  // q is null if this launch does not quantize
    float* amax;       // to raise, may be null
    int64_t rows;
    int columns, tile_rows;
    float eps;
};

template <int Held, bool WarpRow, bool Add>
struct Row {
    Octet x[Held];
    Octet residual[Add ? Held : 1];

    __device__ __forceinline__ void load(const Buffers& b, int64_t start, const RowGroup<WarpRow>& group) {
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            const int i = group.lane + k * group.lanes;
            if (i < b.columns / 8) {
                x[k] = Octet::load(b.x + start + i * 8);
                if constexpr (Add) {
                    residual[k] = Octet::load(b.residual + start + i * 8);
                }
            }
        }
    }

    // Adds the residual, writes the sum and keeps it in x. Returns this thread's sum of squares.
    __device__ __forceinline__ float squares(const Buffers& b, int64_t start, const RowGroup<WarpRow>& group) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < Held; ++k) {
            const int i = group.lane + k * group.lanes;
            if (i < b.columns / 8) {
                float values[8];
                x[k].to_float(values);
                if constexpr (Add) {
                    float other[8];
                    residual[k].to_float(other);
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        values[j] += other[j];
                    }
                    x[k] = Octet::from_float(values);
                    x[k].store(b.residual_out + start + i * 8);
                    x[k].to_float(values);
                }
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    sum = fmaf(values[j], values[j], sum);
                }
            }
        }
        return sum;
    }
};

__device__ __forceinline__ Octet normalise(Octet& x, float rstd, Octet w) {
    float values[8], weight[8];
    x.to_float(values);
    w.to_float(weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = values[i] * rstd * weight[i];
    }
    return Octet::from_float(values);
}

// Held: number of octets of a row that a thread keeps in registers.
template <int Held, bool WarpRow, bool Add>
__global__ void __launch_bounds__(WarpRow ? 512 : 1024)
    norm_kernel(const Buffers b, const Scale scale, int lanes) {
    constexpr bool prefetches = !WarpRow && Held == 2;
    extern __shared__ __align__(16) uint8_t bytes[];
    __shared__ typename RowSums<WarpRow>::Scratch scratch;
    __shared__ uint32_t tops[32];
    const RowGroup<WarpRow> group(lanes);
    const RowTile tile{bytes, b.columns};
    RowSums<WarpRow> sums(scratch, group);
    const int64_t first_row = static_cast<int64_t>(blockIdx.x) * b.tile_rows;
    const int rows = static_cast<int>(min(static_cast<int64_t>(b.tile_rows), b.rows - first_row));
    const float encode = b.q != nullptr ? encode_of<E4M3>(scale) : 1.0f;
    AbsMax top;

    Row<Held, WarpRow, Add> row;
    if (prefetches && group.index < rows) {
        row.load(b, (first_row + group.index) * b.columns, group);
    }
    for (int r = group.index; r < rows; r += group.count) {
        const int64_t start = (first_row + r) * b.columns;
        Row<Held, WarpRow, Add> next;
        if (!prefetches) {
            row.load(b, start, group);
        } else if (r + group.count < rows) {
            next.load(b, start + static_cast<int64_t>(group.count) * b.columns, group);
        }
        const float mean = sums.tree(row.squares(b, start, group)) / b.columns;
        const float rstd = 1.0f / sqrtf(mean + b.eps);
        if (group.lane == 0) {
            b.rstd[first_row + r] = rstd;
        }
        if (b.q != nullptr || b.amax != nullptr) {
#pragma unroll
            for (int k = 0; k < Held; ++k) {
                const int i = group.lane + k * group.lanes;
                if (i < b.columns / 8) {
                    Octet norm = normalise(row.x[k], rstd, Octet::load(b.w + i * 8));
                    if (b.amax != nullptr) {
                        top.add(norm);
                    }
                    if (b.q != nullptr) {
                        if (b.norm != nullptr) {
                            norm.store(b.norm + start + i * 8);
                        }
                        float values[8];
                        uint32_t words[2];
                        norm.to_float(values);
                        quantize<E4M3>(values, encode, words);
                        *reinterpret_cast<uint2*>(b.q + start + i * 8) = make_uint2(words[0], words[1]);
                        if (b.q_t != nullptr) {
                            *reinterpret_cast<uint2*>(tile.at(r, i * 8)) = make_uint2(words[0], words[1]);
                        }
                    }
                }
            }
        }
        if (prefetches) {
            row = next;
        }
    }
    if (b.amax != nullptr) {
        top.stage(tops);
    }
    __syncthreads();
    if (b.q_t != nullptr) {
        tile.write(b.q_t, first_row, b.rows, b.tile_rows);
    }
    if (b.amax != nullptr) {
        AbsMax::raise(tops, b.amax);
    }
}

// The norm of rows whose rstd is known, for the launch that quantizes after one that measures.
struct NormSource {
    using Value = Octet;
    struct Raw {
        Octet x, w;
        float rstd;
    };
    static constexpr bool can_store = true;
    static constexpr int outputs = 1, count = 1, blocks = 4;

    const __nv_bfloat16 *x, *w;
    const float* rstd;
    int64_t columns;

    __device__ __forceinline__ Raw fetch(int64_t row, int64_t column) const {
        return {Octet::load(x + row * columns + column), Octet::load(w + column), rstd[row]};
    }
    __device__ __forceinline__ void values(Raw& raw, Value (&v)[1]) const { v[0] = normalise(raw.x, raw.rstd, raw.w); }
};

// Returns the number of threads of a block with groups of `lanes`. Few blocks, or blocks that leave no shared memory for a
// second one on an SM, are large, so that enough loads are in flight.
int threads_for(int lanes, int64_t shared, int64_t blocks) {
    const bool alone = shared > 113 * 1024 || blocks <= kMultiprocessors;
    const int most = lanes == 32 ? row_warps(blocks) * 32 : alone ? 1024 : 512;
    return most / lanes * lanes;
}

template <bool Add>
void launch(const Buffers& b, const Scale& scale, const char* op, cudaStream_t stream) {
    const int octets = b.columns / 8, held = octets <= 2048 ? 2 : 4;
    const int lanes = octets <= 256 ? 32 : static_cast<int>(ceil_div(ceil_div(octets, held), 32) * 32);
    const auto run = [&](auto kernel) {
        const int64_t shared = b.q_t == nullptr ? 0 : RowTile::size(b.tile_rows, b.columns);
        allow_shared_memory(kernel, static_cast<int>(shared), op);
        const int blocks = to_int(ceil_div(b.rows, b.tile_rows), op, "rows");
        kernel<<<blocks, threads_for(lanes, shared, blocks), shared, stream>>>(b, scale, lanes);
        check_launch(op);
    };
    if (octets <= 64) {
        run(norm_kernel<2, true, Add>);
    } else if (octets <= 128) {
        run(norm_kernel<4, true, Add>);
    } else if (octets <= 256) {
        run(norm_kernel<8, true, Add>);
    } else if (held == 2) {
        run(norm_kernel<2, false, Add>);
    } else {
        run(norm_kernel<4, false, Add>);
    }
}

void check(const RmsNorm& t, Extent size, const char* op) {
    check_tiles(size.rows, size.columns, op);
    SUROGATE_REQUIRE(size.columns <= 32768, op, "columns must not exceed 32768, got " + std::to_string(size.columns));
    check_pointer(t.x, op, "x", 16);
    check_pointer(t.w, op, "w", 16);
    check_pointer(t.q, op, "q", 16);
    check_pointer(t.rstd, op, "rstd", 4);
    if (t.residual != nullptr) {
        check_pointer(t.residual, op, "residual", 16);
        check_pointer(t.residual_out, op, "residual_out", 16);
    }
    SUROGATE_REQUIRE(is_aligned(t.q_t, 16), op, "q_t must be aligned to 16 bytes");
    SUROGATE_REQUIRE(is_aligned(t.norm, 16), op, "norm must be aligned to 16 bytes");
}

}  // namespace

void fp8_rmsnorm(const RmsNorm& t, Extent size, int format, const Scale& scale, cudaStream_t stream) {
    const bool adds = t.residual != nullptr;
    const char* op = adds ? "fp8_add_rmsnorm" : "fp8_rmsnorm";
    check(t, size, op);
    check_scale(scale, op);
    require_format(format, E4M3, op);
    Buffers b{static_cast<const __nv_bfloat16*>(t.x),
              static_cast<const __nv_bfloat16*>(t.residual),
              static_cast<const __nv_bfloat16*>(t.w),
              static_cast<__nv_bfloat16*>(t.norm),
              static_cast<__nv_bfloat16*>(t.residual_out),
              static_cast<float*>(t.rstd),
              static_cast<uint8_t*>(t.q),
              static_cast<uint8_t*>(t.q_t),
              scale.scaling == kDelayed ? scale.amax : nullptr,
              size.rows,
              to_int(size.columns, op, "columns"),
              32,
              t.eps};
    const int fitting = t.q_t == nullptr ? 32 : tile_rows_for(size.columns, op);
    const bool at_once = !scale.measures() && fitting != 0;
    if (at_once) {
        b.tile_rows = fitting;
    } else {
        b.q = b.q_t = nullptr;
        b.norm = nullptr;
        b.amax = scale.measures() ? scale.measured : nullptr;
    }
    if (scale.measures()) {
        check_cuda(cudaMemsetAsync(scale.measured, 0, 8, stream), op);
    }
    adds ? launch<true>(b, scale, op, stream) : launch<false>(b, scale, op, stream);
    if (!at_once) {
        const NormSource source{adds ? b.residual_out : b.x, b.w, b.rstd, size.columns};
        const Quantized to{static_cast<uint8_t*>(t.q), static_cast<uint8_t*>(t.q_t), static_cast<__nv_bfloat16*>(t.norm)};
        launch_quantize<E4M3>(source, to, scale, size.rows, size.columns, op, stream);
    }
}

}  // namespace surogate
