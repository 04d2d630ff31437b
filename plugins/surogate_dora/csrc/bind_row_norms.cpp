#include <surogate/bind.h>

#include "row_norms.h"

void bind_row_norms(nanobind::module_& m) { surogate::bind_launcher(m, "dora_row_norms", surogate::dora_row_norms); }
