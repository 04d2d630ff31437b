#include <surogate/bind.h>

#include "latent.h"

void bind_mla(nanobind::module_& m) {
    using namespace surogate;
    bind_launcher(m, "latent_split", latent_split);
    bind_launcher(m, "latent_split_bwd", latent_split_bwd);
    bind_launcher(m, "latent_qkv", latent_qkv);
    bind_launcher(m, "latent_qkv_bwd", latent_qkv_bwd);
    bind_launcher(m, "latent_values", latent_values);
}
