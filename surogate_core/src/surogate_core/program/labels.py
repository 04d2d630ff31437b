"""Labels of the values of a block by which the backward pass chooses what it computes again.

No other file knows which values belong to a part of a block. A model adds labels of its own (`ModelDef.recompute`).
"""

from __future__ import annotations

from collections.abc import Mapping

BLOCK_INPUT = "residual"
"""Label of the value that enters a block. It is kept when whole blocks are recomputed, but every second one where pairs
of them are."""

LABELS: Mapping[str, frozenset[str]] = {
    "rmsnorm": frozenset({"norm"}),
    "swiglu": frozenset({"swiglu"}),
    "qkv": frozenset({"qkv", "rope"}),
    "att": frozenset({"qkv", "rope", "attention", "lse", "attn_out"}),
    "ffn": frozenset({"gate_up", "swiglu", "mlp_out"}),
}
"""The labels of the values that a part drops. Three parts have no list of labels: `block` drops all values of a block
except the one that enters it and those of an adapter, `adapter` those too, and `pairs` what `block` drops and the
values that enter blocks of even index, but the first."""

KEY = "recompute_"
"""A key of `ModelDef.recompute` is this and a part."""


def labels_of(own: Mapping[str, frozenset[str]]) -> Mapping[str, frozenset[str]]:
    """Return the labels that each part drops in a model with labels of its `own`, {key: labels}.

    A part that includes another drops the model's labels of that one too.
    """
    return {
        part: labels.union(*(own.get(KEY + inside, ()) for inside in LABELS if LABELS[inside] <= labels))
        for part, labels in LABELS.items()
    }
