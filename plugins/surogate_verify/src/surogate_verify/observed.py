"""The tensors that are compared, in the same form for both sides."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

EMBEDDING = "embedding"
LOGITS = "logits"
LOGIT_POSITIONS = 128
"""Positions whose logits are kept. With a vocabulary of 150,000 the logits of a whole batch would be gigabytes."""


def block_name(block: int) -> str:
    return f"block {block}"


@dataclass
class Observed:
    """Results of one forward and backward pass, fp32 on the host.

    states     in the order of the forward pass: "embedding", "block 0", ..., each [positions, C], and "logits" [at most
               128 positions, V]
    gradients  of the mean loss, by the name of the checkpoint's tensor or of the adapter's param
    choices    integers [positions, k] of each op that makes whole numbers of others, as routers do; of transformers,
               its own, and taken: ours, with which it goes on. Choices of groups are in front of those of experts.
               values: [positions, n], of which its own are the largest. widths: each n
    buffers    tensors of checkpoints that transformers holds as buffers: it does not train them
    """

    loss: float = float("nan")
    states: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    choices: list[Tensor] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    buffers: frozenset[str] = frozenset()
