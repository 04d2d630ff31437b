#include <surogate/bind.h>

#include "expert_bias.h"
#include "weighted_gate.h"
#include "routes.h"
#include "rows.h"

void bind_routes(nanobind::module_& m) {
    surogate::bind_launcher(m, "route", surogate::route);
    surogate::bind_launcher(m, "route_bwd", surogate::route_bwd);
    surogate::bind_launcher(m, "sigmoid_route", surogate::sigmoid_route);
    surogate::bind_launcher(m, "sigmoid_route_bwd", surogate::sigmoid_route_bwd);
    surogate::bind_launcher(m, "expert_order", surogate::expert_order);
    surogate::bind_launcher(m, "router_load", surogate::router_load);
    surogate::bind_launcher(m, "gather_rows", surogate::gather_rows);
    surogate::bind_launcher(m, "sum_rows", surogate::sum_rows);
    surogate::bind_launcher(m, "weighted_swiglu", surogate::weighted_swiglu);
    surogate::bind_launcher(m, "weighted_swiglu_bwd", surogate::weighted_swiglu_bwd);
    surogate::bind_launcher(m, "gate_rows", surogate::gate_rows);
    surogate::bind_launcher(m, "gate_rows_bwd", surogate::gate_rows_bwd);
    surogate::bind_launcher(m, "weighted_gate", surogate::weighted_gate);
    surogate::bind_launcher(m, "weighted_gate_bwd", surogate::weighted_gate_bwd);
    surogate::bind_launcher(m, "add_expert_bias", surogate::add_expert_bias);
    surogate::bind_launcher(m, "expert_bias_dgrad", surogate::expert_bias_dgrad);
    surogate::bind_launcher(m, "expert_bias_grad", surogate::expert_bias_grad);
    surogate::bind_launcher(m, "grouped_linear_bgrad", surogate::grouped_linear_bgrad);
}
