"""Ops and programs: a flat list, in the order in which it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .value import Value

Phase = Literal["forward", "backward", "recompute", "update", "load"]

Stage = Literal["forward", "micro", "evaluate", "update", "load"]
"""What a program is for. "forward" is the recorded model, before passes make "micro" and "evaluate" of it."""

Lane = Literal["compute", "comm"]
"""Where an op runs: "compute" is in order; "comm" runs beside it, in an order of its own, from the moment when what
comes before it in the program is done. What an op of one lane leaves, an op of the other waits for."""


@dataclass(frozen=True, eq=False)
class Op:
    """One step of a program: `outs = kind(ins, **attrs)`.

    attrs       plain values that never change between runs; what changes is an input value (lr, step, seed)
    accumulate  indices of `outs` that are added to (`+=`) instead of written
    block       transformer block, -1 outside
    where       "file:line" of the emit, for error messages
    lane        whether it runs in order with the rest or beside it
    """

    kind: str
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    block: int = -1
    phase: Phase = "forward"
    accumulate: frozenset[int] = frozenset()
    where: str = ""
    lane: Lane = "compute"


@dataclass(frozen=True, eq=False)
class Program:
    """A list of ops and the values that a caller reads afterwards (they keep their producers alive).

    name        unique within a family of programs
    stage       what the program is for
    first       micro-step only: writes the gradients; the others add to them
    last        micro-step only: sums the gradients over the workers; False where there is one worker
    documents   the most documents that a batch may have; None: as many as the run was planned for
    """

    name: str
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...] = ()
    stage: Stage = "forward"
    first: bool = False
    last: bool = False
    documents: int | None = None

    def values(self) -> list[Value]:
        """Every value that the program touches, each once, in order of first appearance."""
        seen: dict[Value, None] = {}
        for op in self.ops:
            for value in (*op.ins, *op.outs):
                seen.setdefault(value)
        for value in self.outputs:
            seen.setdefault(value)
        return list(seen)
