"""Which values each `recompute_*` key drops after the forward pass. The only place that knows what a key includes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ..program.value import Value

CARRIED = "residual"
"""Label of the value that enters a block. It is kept when whole blocks are recomputed."""

LABELS: Mapping[str, frozenset[str]] = {
    "rmsnorm": frozenset({"norm", "rstd"}),
    "swiglu": frozenset({"swiglu"}),
    "qkv": frozenset({"qkv", "rope"}),
    "att": frozenset({"qkv", "rope", "attention", "lse", "attn_out"}),
    "ffn": frozenset({"gate_up", "swiglu", "mlp_out"}),
}
"""The labels of the values that a key drops. `block` drops all values of a block except the one that enters it."""

PARTS = ("block", "att", "ffn", "rmsnorm", "qkv", "swiglu")


def selector(parts: Collection[str]) -> Callable[[Value], bool]:
    """Return the predicate that is true for the values inside blocks which `parts` drop."""
    if "block" in parts:
        return lambda value: value.label != CARRIED
    labels = frozenset().union(*(LABELS[part] for part in parts))
    return lambda value: value.label in labels


def includes(parts: Collection[str], part: str) -> bool:
    """Return whether `parts` drop everything that `part` drops."""
    if "block" in parts or part == "block":
        return "block" in parts
    return LABELS[part] <= frozenset().union(*(LABELS[p] for p in parts))
