"""The parts of blocks that the backward pass recomputes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from ..api import ADAPTER_LABEL
from ..front_end import called
from ..machine.devices import GIB
from ..program.labels import BLOCK_INPUT, LABELS
from ..program.value import Value

PARTS = ("pairs", "adapter", "block", "att", "ffn", "rmsnorm", "qkv", "swiglu")
"""All parts."""

CHOICES: tuple[frozenset[str], ...] = (
    *(frozenset(filter(None, parts)) for parts in product(("", "swiglu", "ffn"), ("", "qkv", "att"), ("", "rmsnorm"))),
    frozenset({"block"}),
    frozenset({"adapter"}),
)
"""Every set of parts, none of which includes another."""


@dataclass(frozen=True)
class Recomputation:
    """Parts that are recomputed: `parts` in every block except the first `count`, in which it is `first`."""

    parts: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()
    count: int = 0

    def drops(self, value: Value, labels: Mapping[str, Collection[str]] = LABELS) -> bool:
        """Return whether a value inside a block is dropped after the forward pass. labels: those of each part."""
        parts = self.first if value.block < self.count else self.parts
        if value.label == BLOCK_INPUT:
            return "pairs" in parts and value.block > 0 and value.block % 2 == 0
        if not parts.isdisjoint(("pairs", "adapter", "block")):
            return value.label != ADAPTER_LABEL or "adapter" in parts
        return any(value.label in labels[part] for part in parts)

    def __bool__(self) -> bool:
        return bool(self.parts or (self.count and self.first))

    def text(self, n_blocks: int) -> str:
        """Return what is recomputed, and in which of `n_blocks` blocks."""
        if not self.count:
            return f"{_names(self.parts)} in all {n_blocks} blocks"
        blocks = "block" if self.count == 1 else f"{self.count} blocks"
        first = f"{_names(self.first)} in the first {blocks} of {n_blocks}"
        return f"{first}, {_names(self.parts)} in the others" if self.parts else first


@dataclass(frozen=True)
class ChosenRecomputation:
    """The recomputation that the planner chose so that a run fits, compared with the plan without it.

    saves    bytes on the device
    costs    additional seconds per step, of `step` seconds without
    n_blocks of the model
    """

    recomputation: Recomputation
    saves: int
    costs: float
    step: float
    n_blocks: int

    def __str__(self) -> str:
        return (
            f"recompute: auto chose {self.recomputation.text(self.n_blocks)}: saves {self.saves / GIB:.2f} GiB, "
            f"adds {self.costs * 1e3:,.0f} ms to a step ({self.costs / self.step:.1%})"
        )


def _names(parts: Collection[str]) -> str:
    """Return the parts as users name them, without those that another one includes."""
    if "pairs" in parts:
        named = ["pairs", *(["adapter"] if "adapter" in parts else [])]
    elif "adapter" in parts:
        named = ["block", "adapter"]
    elif "block" in parts:
        named = ["block"]
    else:
        included = {small for small in parts for large in parts if LABELS[small] < LABELS[large]}
        named = [part for part in PARTS if part in parts and part not in included]
    return ", ".join(called(f"recompute: {part}", part) for part in named)
