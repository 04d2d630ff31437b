#include <surogate/bind.h>

#include "adamw_8bit.h"

void bind_adamw_8bit(nanobind::module_& m) { surogate::bind_launcher(m, "adamw_8bit", surogate::adamw_8bit); }
