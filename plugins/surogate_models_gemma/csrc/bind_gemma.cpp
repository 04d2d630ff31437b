#include <surogate/bind.h>

#include "gemma.h"

void bind_gemma(nanobind::module_& m) {
    surogate::bind_launcher(m, "geglu", surogate::geglu);
    surogate::bind_launcher(m, "geglu_bwd", surogate::geglu_bwd);
    surogate::bind_launcher(m, "scale", surogate::scale);
}
