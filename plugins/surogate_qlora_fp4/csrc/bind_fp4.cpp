#include <surogate/bind.h>

#include "fp4.h"

void bind_fp4(nanobind::module_& m) {
    using namespace surogate;
    using Rows = std::vector<int64_t>;
    bind_launcher(m, "fp4_block_quantize",
                  +[](const void* w, void* codes, void* scales, void* global_scales, void* amax, const Rows& rows,
                      int64_t columns, bool four_over_six, int dtype, cudaStream_t stream) {
                      fp4_block_quantize(w, {codes, scales, global_scales}, amax, {rows, columns}, four_over_six, dtype,
                                         stream);
                  });
    bind_launcher(m, "fp4_block_dequantize",
                  +[](void* codes, void* scales, void* global_scales, void* out, const Rows& rows, int64_t columns,
                      int dtype, cudaStream_t stream) {
                      fp4_block_dequantize({codes, scales, global_scales}, out, {rows, columns}, dtype, stream);
                  });
    bind_launcher(m, "fp4_block_amax",
                  +[](void* codes, void* scales, void* global_scales, void* amax, const Rows& rows, int64_t columns,
                      int dtype, cudaStream_t stream) {
                      fp4_block_amax({codes, scales, global_scales}, amax, {rows, columns}, dtype, stream);
                  });
    bind_launcher(m, "fp4_block_to_e4m3",
                  +[](void* codes, void* scales, void* global_scales, const void* amax, void* copy, void* scale,
                      bool transposed, const Rows& rows, int64_t columns, int dtype, cudaStream_t stream) {
                      fp4_block_to_e4m3({codes, scales, global_scales}, amax, copy, scale, transposed, {rows, columns},
                                        dtype, stream);
                  });
}
