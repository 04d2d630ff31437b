#include <surogate/bind.h>

#include "dropout.h"

void bind_dropout(nanobind::module_& m) { surogate::bind_launcher(m, "lora_dropout", surogate::lora_dropout); }
