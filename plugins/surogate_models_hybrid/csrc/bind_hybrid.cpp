#include <surogate/bind.h>

#include "delta.h"
#include "hybrid.h"

void bind_hybrid(nanobind::module_& m) {
    using namespace surogate;
    bind_launcher(m, "causal_conv", causal_conv);
    bind_launcher(m, "causal_conv_bwd", causal_conv_bwd);
    bind_launcher(m, "gated_delta_rule", gated_delta_rule);
    bind_launcher(m, "gated_delta_rule_bwd", gated_delta_rule_bwd);
    bind_launcher(m, "gated_rmsnorm", gated_rmsnorm);
    bind_launcher(m, "gated_rmsnorm_bwd", gated_rmsnorm_bwd);
    bind_launcher(m, "split_gate", split_gate);
    bind_launcher(m, "join_gate", join_gate);
    bind_launcher(m, "split_key_heads", split_key_heads);
    bind_launcher(m, "join_key_heads", join_key_heads);
    bind_launcher(m, "sigmoid_gate", sigmoid_gate);
    bind_launcher(m, "sigmoid_gate_bwd", sigmoid_gate_bwd);
}
