"""Metrics of the routers of a mixture of experts, of the tokens with a label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surogate_core.api import Metric, Value


def metrics(d: Any, load: Value) -> Sequence[Metric]:
    """Return the metrics of `load`, that `router_load` has collected of all layers: see docs/models.md."""

    def share(load: Any) -> float:
        return entropy(load) / math.log(d.n_experts)

    def entropy(load: Any) -> float:
        """The mean over layers and tokens, of which each has k routes."""
        return float(d.k * load[:, -1].sum() / load[:, :-1].sum())

    of = {"expert_imbalance": imbalance, "router_entropy": entropy, "router_entropy_share": share}
    return [Metric(name, load, of=function) for name, function in of.items() if d.n_experts > 1]


def imbalance(load: Any) -> float:
    """Return the routes of the busiest expert over the mean of its layer, of the layer where that is most."""
    routes = load[:, :-1]
    return float((routes.max(1) / routes.mean(1)).max())
