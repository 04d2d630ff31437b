"""The names for packages of families with experts. Everything else of `surogate_models_moe` may change without notice.

A family reads a `Mixture` from its `config.json`, holds it in `MixtureDims`, and emits it where others have an MLP:

    from surogate_models.api import decoder
    from surogate_models_moe.api import metrics, pre_norm_mixture, pre_norm_mixture_weights

    MODEL = decoder(
        name="acme_moe",
        summary="Acme with experts",
        architecture="AcmeMoeForCausalLM",
        dims=dims,
        block=pre_norm_mixture,
        block_weights=pre_norm_mixture_weights,
        metrics=metrics,
    )

A block with attention of its own ends with `mixture_or_mlp`, which consists of `choose`, `routed`, `shared` and
`collect`; `mixture_weights` consists of the functions that end so. A router of a family's own is an op that makes
weights and experts, and `ordered`.

Ops that a family may emit: `route`, `expert_order`, `gather_rows`, `grouped_linear`, `weighted_swiglu`, `sum_rows`,
`add_expert_bias`, `gate_rows` and `router_load`, which the functions emit. `docs/reference/package-ops.md` describes
them.
"""

from __future__ import annotations

from .config_json import (
    CORRECTED_KEYS,
    read_corrected_router,
    read_dense_layers,
    read_first_dense_layers,
    read_mixture,
    read_normalize,
)
from .experts import expert_weights, routed, stacked_expert_weights
from .metrics import metrics
from .mixture import (
    collect,
    mixture,
    mixture_or_mlp,
    mixture_weights,
    pre_norm_mixture,
    pre_norm_mixture_weights,
)
from .router import Routes, choose, ordered, router_weights
from .shared import shared, shared_weights
from .sizes import Gate, Mixture, MixtureDims, Router

__all__ = [
    "CORRECTED_KEYS",
    "Gate",
    "Mixture",
    "MixtureDims",
    "Router",
    "Routes",
    "choose",
    "collect",
    "expert_weights",
    "metrics",
    "mixture",
    "mixture_or_mlp",
    "mixture_weights",
    "ordered",
    "pre_norm_mixture",
    "pre_norm_mixture_weights",
    "read_corrected_router",
    "read_dense_layers",
    "read_first_dense_layers",
    "read_mixture",
    "read_normalize",
    "routed",
    "router_weights",
    "shared",
    "shared_weights",
    "stacked_expert_weights",
]
