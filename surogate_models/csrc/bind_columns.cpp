#include <surogate/bind.h>

#include "move_columns.h"

void bind_columns(nanobind::module_& m) { surogate::bind_launcher(m, "move_columns", surogate::move_columns); }
