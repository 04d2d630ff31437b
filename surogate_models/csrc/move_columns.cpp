// move_columns: y[row, y_at + i] = x[row, x_at + i] for `rows` rows and `width` bytes; a copy of the CUDA runtime.
//
//   x, y             device memory; all sizes are in bytes
//   x_stride, y_stride  from one row to the next
//
// Bytes: `rows` x `width` read and written.
#include "move_columns.h"

#include "surogate/check.h"

namespace surogate {

void move_columns(const void* x, void* y, int64_t rows, int64_t width, int64_t x_stride, int64_t y_stride, int64_t x_at,
                  int64_t y_at, cudaStream_t stream) {
    constexpr const char* op = "move_columns";
    check_pointer(x, op, "x");
    check_pointer(y, op, "y");
    check_positive(rows, op, "rows");
    check_positive(width, op, "width");
    SUROGATE_REQUIRE(x_at >= 0 && y_at >= 0 && x_at + width <= x_stride && y_at + width <= y_stride, op,
                     "the columns leave their rows");
    check_cuda(cudaMemcpy2DAsync(static_cast<char*>(y) + y_at, y_stride, static_cast<const char*>(x) + x_at, x_stride,
                                 width, rows, cudaMemcpyDeviceToDevice, stream),
               op);
}

}  // namespace surogate
