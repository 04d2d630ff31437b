#include <surogate/bind.h>

#include "move.h"

void bind_move(nanobind::module_& m) { surogate::bind_launcher(m, "dora_move", surogate::dora_move); }
