#include "grouped_kernel.h"

namespace surogate {

std::unique_ptr<GroupedGemm::Impl> make_dgrad(const GroupedShape& shape, const GroupedBuffers& buffers, bool beside) {
    if (beside) {
        return std::make_unique<Prepared<Dgrad, Beside>>(shape, buffers);
    }
    return std::make_unique<Prepared<Dgrad, Below>>(shape, buffers);
}

}  // namespace surogate
