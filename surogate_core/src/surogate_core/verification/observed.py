"""What is compared, of ours and of theirs alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

EMBEDDING = "embedding"
LOGITS = "logits"
LOGIT_POSITIONS = 128
"""Positions whose logits are kept: of vocabularies of 150,000 a whole batch would be gigabytes."""


def block_name(block: int) -> str:
    """What the output of a block is called."""
    return f"block {block}"


@dataclass
class Observed:
    """Results of one forward and backward pass, fp32 on the host.

    states: "embedding", "block 0", ..., each [positions, C], and "logits" [128 of them at most, V], in the order of the
    forward pass. gradients: of the mean loss, by the name of the checkpoint's tensor, or of the adapter's param.
    """

    loss: float = float("nan")
    states: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
