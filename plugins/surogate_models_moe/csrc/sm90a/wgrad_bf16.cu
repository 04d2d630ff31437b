#include "grouped_kernel.h"

namespace surogate {

std::unique_ptr<GroupedGemm::Impl> make_wgrad_bf16(const GroupedShape& shape, const GroupedBuffers& buffers) {
    return std::make_unique<Prepared<Wgrad<Element>, Below>>(shape, buffers);
}

}  // namespace surogate
