#include "grouped_kernel.h"

namespace surogate {

std::unique_ptr<GroupedGemm::Impl> make_wgrad(const GroupedShape& shape, const GroupedBuffers& buffers) {
    return std::make_unique<Prepared<Wgrad<float>, Below>>(shape, buffers);
}

}  // namespace surogate
