#include <surogate/bind.h>

#include "square.h"

void bind_square(nanobind::module_& m) { surogate::bind_launcher(m, "square", square); }
