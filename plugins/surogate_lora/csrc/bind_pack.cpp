#include <surogate/bind.h>

#include "pack.h"

void bind_pack(nanobind::module_& m) { surogate::bind_launcher(m, "lora_move", surogate::lora_move); }
