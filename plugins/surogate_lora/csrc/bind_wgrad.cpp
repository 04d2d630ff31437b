#include <surogate/bind.h>

#include "wgrad.h"

void bind_wgrad(nanobind::module_& m) { surogate::bind_launcher(m, "lora_wgrad", surogate::lora_wgrad); }
