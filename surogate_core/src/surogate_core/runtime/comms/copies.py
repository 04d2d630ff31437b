"""Ranks that are threads of one process and read each other's memory: that of the host, of one GPU, or of peers.

On a GPU the hosts of the ranks meet in each call and exchange events, which their streams then wait for. An event has
been recorded before a stream waits for it, so no stream waits for work that is not enqueued yet: ranks on one GPU need
not run at the same time, and cannot block each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...api import Span
from ...api.world import How, Position
from .meeting import SECONDS, Meeting
from .reference import combined
from .spans import aligned, check_pairs, check_reducible, chunk, copy, current, part, tensor, whole

PIECE = 1 << 22
"""Elements that are combined at a time, because sums take memory of their own."""

AnySpan = Span | tuple[Span, Span]


class CopiesComm:
    """The `Comm` of a rank. Sums are those of `reference.combined`, on every device."""

    capturable = False

    def __init__(self, meeting: Meeting, rank: int, device: int = 0) -> None:
        self.rank = rank
        self.device = device
        self.world_size = meeting.size
        self.position = Position()
        self._meeting = meeting

    def all_reduce(self, spans: Sequence[Span], how: How, stream: int) -> None:
        """Combine a chunk of each span on each rank, then copy the chunks of the others."""
        check_reducible("all_reduce", spans)
        with self._collective(f"all_reduce({how})", spans, stream) as (ranks, meet):
            for of_ranks in zip(*ranks, strict=True):
                self._combine(chunk(of_ranks[self.rank], self.rank, self.world_size), of_ranks, chunk, how, stream)
            meet()
            for of_ranks in zip(*ranks, strict=True):
                for peer, span in self._others(of_ranks):
                    own = chunk(of_ranks[self.rank], peer, self.world_size)
                    copy(own, chunk(span, peer, self.world_size), stream)

    def reduce_scatter(self, spans: Sequence[tuple[Span, Span]], how: How, stream: int) -> None:
        check_pairs("reduce_scatter", spans, self.world_size, 1)
        check_reducible("reduce_scatter", [source for source, _ in spans])
        with self._collective(f"reduce_scatter({how})", spans, stream) as (ranks, _):
            for of_ranks in zip(*ranks, strict=True):
                sources = [source for source, _ in of_ranks]
                self._combine(of_ranks[self.rank][1], sources, part, how, stream)

    def all_gather(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        check_pairs("all_gather", spans, 1, self.world_size)
        with self._collective("all_gather", spans, stream) as (ranks, _):
            for of_ranks in zip(*ranks, strict=True):
                for peer, (source, _) in enumerate(of_ranks):
                    copy(part(of_ranks[self.rank][1], peer, self.world_size), source, stream)

    def reduce(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], how: How, stream: int) -> None:
        check_pairs("reduce", spans, 1, 1)
        check_reducible("reduce", [source for source, _ in spans])
        with self._collective(f"reduce({how}) to ranks {[*roots]}", spans, stream) as (ranks, _):
            for root, of_ranks in zip(roots, zip(*ranks, strict=True), strict=True):
                if root == self.rank:
                    self._combine(of_ranks[root][1], [source for source, _ in of_ranks], whole, how, stream)

    def broadcast(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], stream: int) -> None:
        check_pairs("broadcast", spans, 1, 1)
        with self._collective(f"broadcast from ranks {[*roots]}", spans, stream) as (ranks, _):
            for root, of_ranks in zip(roots, zip(*ranks, strict=True), strict=True):
                copy(of_ranks[self.rank][1], of_ranks[root][0], stream)

    def all_to_all(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        check_pairs("all_to_all", spans, 1, 1)
        with self._collective("all_to_all", spans, stream) as (ranks, _):
            for of_ranks in zip(*ranks, strict=True):
                for peer, (source, _) in enumerate(of_ranks):
                    target = part(of_ranks[self.rank][1], peer, self.world_size)
                    copy(target, part(source, self.rank, self.world_size), stream)

    def barrier(self, stream: int) -> None:
        with self._collective("barrier", (), stream):
            pass

    def check(self) -> None:
        """See `Comm`. Nothing happens asynchronously: calls raise."""

    def abort(self) -> None:
        self._meeting.end()

    def _combine(self, target: Span, spans: Sequence[Span], divide: Any, how: How, stream: int) -> None:
        """Write the sum of the rank's parts of `spans`, one of each rank, to `target`, which may be one of them."""
        own = tensor(target, stream)
        parts = [tensor(divide(span, self.rank, self.world_size), stream).split(PIECE) for span in spans]
        for to, *values in zip(own.split(PIECE), *parts, strict=True):
            to.copy_(combined([aligned(value).to(own.device) for value in values], how))

    def _others(self, spans: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        return ((rank, span) for rank, span in enumerate(spans) if rank != self.rank)

    @contextmanager
    def _collective(self, name: str, spans: Sequence[AnySpan], stream: int) -> Iterator[tuple[Any, Any]]:
        """Yield the spans of all ranks, and what to call between two stages. The ranks meet before and after.

        Raises CollectiveError if they have not called the same collective with as many elements of the same dtypes.
        """
        what = f"{name}{_sizes(spans)}"

        def meet() -> Sequence[Any]:
            event = torch.cuda.current_stream().record_event() if stream else None
            ranks = self._meeting.exchange(self.rank, what, (spans, event))
            for _, (_, other) in self._others(ranks) if stream else ():
                torch.cuda.current_stream().wait_event(other)
            return [given for given, _ in ranks]

        with current(stream, self.device):
            yield meet(), meet
            meet()


def connect(devices: Sequence[int], seconds: float = SECONDS) -> tuple[CopiesComm, ...]:
    """Return a communicator for each rank of a process, in order. `devices` may repeat."""
    meeting = Meeting(len(devices), seconds)
    return tuple(CopiesComm(meeting, rank, device) for rank, device in enumerate(devices))


def _sizes(spans: Sequence[AnySpan]) -> str:
    """Return the sizes of spans for messages: " of 10 fp32, 3 bf16"."""
    firsts: Any = [span if isinstance(span[1], int) else span[0] for span in spans]
    return (" of " if firsts else "") + ", ".join(f"{elements} {dtype}" for _, elements, dtype in firsts)
