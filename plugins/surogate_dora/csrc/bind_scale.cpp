#include <surogate/bind.h>

#include "scale.h"

void bind_scale(nanobind::module_& m) {
    surogate::bind_launcher(m, "dora_scale", surogate::dora_scale);
    surogate::bind_launcher(m, "dora_scale_bwd", surogate::dora_scale_bwd);
}
