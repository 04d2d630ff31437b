#include <surogate/bind.h>

#include "mxfp4.h"

void bind_mxfp4(nanobind::module_& m) {
    using namespace surogate;
    using Rows = std::vector<int64_t>;
    bind_launcher(m, "mxfp4_quantize", mxfp4_quantize);
    bind_launcher(m, "mxfp4_dequantize",
                  +[](void* codes, void* scales, void* out, const Rows& rows, int64_t columns, int dtype,
                      cudaStream_t stream) {
                      mxfp4_dequantize({codes, scales}, out, {rows, columns}, dtype, stream);
                  });
    bind_launcher(m, "mxfp4_amax",
                  +[](void* codes, void* scales, void* amax, const Rows& rows, int64_t columns, int dtype,
                      cudaStream_t stream) { mxfp4_amax({codes, scales}, amax, {rows, columns}, dtype, stream); });
    bind_launcher(m, "mxfp4_to_e4m3",
                  +[](void* codes, void* scales, const void* amax, int64_t of, void* copy, void* scale, bool transposed,
                      const Rows& rows, int64_t columns, int dtype, cudaStream_t stream) {
                      mxfp4_to_e4m3({codes, scales}, amax, of, copy, scale, transposed, {rows, columns}, dtype, stream);
                  });
    bind_launcher(m, "mxfp4_to_e5m2",
                  +[](void* codes, void* scales, const void* amax, int64_t of, void* copy, void* scale, bool transposed,
                      const Rows& rows, int64_t columns, int dtype, cudaStream_t stream) {
                      mxfp4_to_e5m2({codes, scales}, amax, of, copy, scale, transposed, {rows, columns}, dtype, stream);
                  });
}
