#include <surogate/bind.h>

#include "token_loss.h"

void bind_token_loss(nanobind::module_& m) {
    surogate::bind_launcher(m, "token_loss", surogate::token_loss);
    surogate::bind_launcher(m, "token_loss_bwd", surogate::token_loss_bwd);
}
