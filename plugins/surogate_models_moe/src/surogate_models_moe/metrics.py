"""Metrics of the routers of a mixture of experts, of the tokens with a label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surogate_core.api import Metric, Value

from .sizes import MixtureDims

_ALL = 0.95
"""An expert with this share of a layer's tokens counts as one that gets all of them."""
_ENOUGH_TOKENS = 32
"""Of fewer tokens, chance may send all to one expert."""
_COLLAPSED = (
    "in most steps so far, one expert of a layer gets all tokens: its router has collapsed. Lower learning_rate, or "
    "train no routers, as lora: true does. If none is trained, the base model does this"
)


def metrics(d: MixtureDims, load: Value) -> Sequence[Metric]:
    """Return the metrics of `load`, that `router_load` has collected of all layers: see docs/models.md.

    Sigmoids do not compete for a share of one, so that a router of them has no entropy: it reports the imbalance alone.
    """
    m = d.mixture

    def share(load: Any) -> float:
        return entropy(load) / math.log(m.n_experts)

    def entropy(load: Any) -> float:
        """The mean over layers and tokens, of which each has k routes."""
        return float(m.k * load[:, -1].sum() / load[:, :-1].sum())

    def doubt(load: Any) -> str:
        tokens = load[:, :-1].sum(1).min() / m.k
        collapsed = tokens >= _ENOUGH_TOKENS and imbalance(load) >= _ALL * m.n_experts / m.k > 1
        return _COLLAPSED if collapsed else ""

    if m.n_experts == 1:
        return []
    balance = Metric("expert_imbalance", load, of=imbalance, doubt=doubt)
    if m.router.scoring != "softmax":
        return [balance]
    return [
        balance,
        Metric("router_entropy", load, of=entropy),
        Metric("router_entropy_share", load, of=share),
    ]


def imbalance(load: Any) -> float:
    """Return the routes of the busiest expert over the mean of its layer, of the layer where that is most."""
    routes = load[:, :-1]
    return float((routes.max(1) / routes.mean(1)).max())
