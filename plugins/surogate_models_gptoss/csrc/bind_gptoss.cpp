#include <surogate/bind.h>

#include "sinks.h"

void bind_gptoss(nanobind::module_& m) {
    using namespace surogate;
    bind_launcher(m, "add_sinks", add_sinks);
    bind_launcher(m, "sinks_gradient", sinks_gradient);
}
