"""The communicator of one rank, which has nothing to exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...api import Span
from ...api.world import How, Position


@dataclass(frozen=True)
class SingleComm:
    """The `Comm` of a run with one rank, which has nothing to exchange."""

    rank: int = 0
    world_size: int = 1
    device: int = 0
    capturable: bool = True
    allocate: None = None
    allocated: int = 0
    position: Position = field(default_factory=Position, compare=False)

    def _nothing(self, *given: Any, **named: Any) -> None:
        """There is no other rank."""

    all_reduce = barrier = check = abort = _nothing

    def reduce_scatter(self, spans: Sequence[tuple[Span, Span]], how: How, stream: int) -> None:
        self.all_to_all(spans, stream)

    def all_to_all(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        """Copy each first span to the second one."""
        from .spans import copy, current

        with current(stream, self.device):
            for source, target in spans:
                copy(target, source, stream)

    all_gather = all_to_all

    def reduce(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], how: How, stream: int) -> None:
        self.all_to_all(spans, stream)

    def broadcast(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], stream: int) -> None:
        self.all_to_all(spans, stream)


ALONE = SingleComm()
