#include <surogate/bind.h>

#include "tiles.h"

void bind_tiles(nanobind::module_& m) {
    using namespace surogate;
    using Rows = std::vector<int64_t>;
    bind_launcher(m, "fp8_tile_quantize",
                  +[](const void* w, void* codes, void* scales, const Rows& rows, int64_t columns, int tile, int dtype,
                      cudaStream_t stream) {
                      fp8_tile_quantize(w, codes, scales, {rows, columns, tile}, dtype, stream);
                  });
    bind_launcher(m, "fp8_tile_dequantize",
                  +[](const void* codes, const void* scales, void* out, const Rows& rows, int64_t columns, int tile,
                      int dtype, cudaStream_t stream) {
                      fp8_tile_dequantize(codes, scales, out, {rows, columns, tile}, dtype, stream);
                  });
    bind_launcher(m, "fp8_tile_amax",
                  +[](const void* codes, const void* scales, void* amax, const Rows& rows, int64_t columns, int tile,
                      int dtype, cudaStream_t stream) {
                      fp8_tile_amax(codes, scales, amax, {rows, columns, tile}, dtype, stream);
                  });
    bind_launcher(m, "fp8_tile_to_e4m3",
                  +[](const void* codes, const void* scales, const void* amax, void* copy, void* scale, bool transposed,
                      const Rows& rows, int64_t columns, int tile, int dtype, cudaStream_t stream) {
                      fp8_tile_to_e4m3(codes, scales, amax, copy, scale, transposed, {rows, columns, tile}, dtype,
                                       stream);
                  });
}
