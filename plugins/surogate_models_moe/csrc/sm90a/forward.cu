#include "grouped_kernel.h"

namespace surogate {

std::unique_ptr<GroupedGemm::Impl> make_forward(const GroupedShape& shape, const GroupedBuffers& buffers, bool beside) {
    if (beside) {
        return std::make_unique<Prepared<Forward, Beside>>(shape, buffers);
    }
    return std::make_unique<Prepared<Forward, Below>>(shape, buffers);
}

}  // namespace surogate
