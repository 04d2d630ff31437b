#include <surogate/bind.h>

#include "adamw.h"

void bind_adamw(nanobind::module_& m) { surogate::bind_launcher(m, "adamw", surogate::adamw); }
