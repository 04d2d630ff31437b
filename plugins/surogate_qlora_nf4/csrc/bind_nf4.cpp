#include <surogate/bind.h>

#include "nf4.h"

void bind_nf4(nanobind::module_& m) {
    using namespace surogate;
    using Rows = std::vector<int64_t>;
    bind_launcher(m, "nf4_quantize",
                  +[](const void* w, void* codes, void* absmax, const Rows& rows, int64_t columns, int block, int dtype,
                      cudaStream_t stream) {
                      nf4_quantize(w, codes, absmax, {rows, columns, block}, dtype, stream);
                  });
    bind_launcher(m, "nf4_compress",
                  +[](const void* absmax, void* sums, void* codes, void* nested, void* offset, const void* map,
                      const Rows& rows, int64_t columns, int block, cudaStream_t stream) {
                      nf4_compress(absmax, sums, codes, nested, offset, map, {rows, columns, block}, stream);
                  });
    bind_launcher(m, "nf4_dequantize",
                  +[](const void* codes, const void* absmax, const void* nested, const void* offset, const void* map,
                      void* out, const Rows& rows, int64_t columns, int block, int dtype, cudaStream_t stream) {
                      nf4_dequantize(codes, {absmax, nested, offset, map}, out, {rows, columns, block}, dtype, stream);
                  });
    bind_launcher(m, "nf4_amax",
                  +[](const void* codes, const void* absmax, const void* nested, const void* offset, const void* map,
                      void* amax, const Rows& rows, int64_t columns, int block, int dtype, cudaStream_t stream) {
                      nf4_amax(codes, {absmax, nested, offset, map}, amax, {rows, columns, block}, dtype, stream);
                  });
    bind_launcher(m, "nf4_to_e4m3",
                  +[](const void* codes, const void* absmax, const void* nested, const void* offset, const void* map,
                      const void* amax, void* copy, void* scale, bool transposed, const Rows& rows, int64_t columns,
                      int block, int dtype, cudaStream_t stream) {
                      nf4_to_e4m3(codes, {absmax, nested, offset, map}, amax, copy, scale, transposed,
                                  {rows, columns, block}, dtype, stream);
                  });
}
