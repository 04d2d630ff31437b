#include <surogate/bind.h>

#include "qk_norm_rope.h"

void bind_rope(nanobind::module_& m) {
    using namespace surogate;
    bind_launcher(m, "qk_norm_rope", qk_norm_rope);
    bind_launcher(m, "qk_norm_rope_bwd", qk_norm_rope_bwd);
    bind_launcher(m, "qk_norm_rope_dgrad", qk_norm_rope_dgrad);
    bind_launcher(m, "rope", rope);
    bind_launcher(m, "rope_bwd", rope_bwd);
}
