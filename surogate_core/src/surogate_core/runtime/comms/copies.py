"""Ranks that are threads of one process and read each other's memory: that of the host, of one GPU, or of peers.

On a GPU the hosts of the ranks meet in each call and exchange events, which their streams then wait for. An event has
been recorded before a stream waits for it, so no stream waits for work that is not enqueued yet: ranks on one GPU need
not run at the same time, and cannot block each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ...api.world import CollectiveError
from .exchange import SECONDS, ExchangingComm, Item, Use
from .spans import current, tensor


class Meeting:
    """A place where the threads of `size` ranks exchange values, until one fails or `end` is called."""

    def __init__(self, size: int, seconds: float = SECONDS) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, self._close_round, seconds)
        self._seconds = seconds
        self._given: dict[int, tuple[str, Any]] = {}
        self._all: tuple[Any, ...] = ()
        self._ended = ""

    def exchange(self, rank: int, what: str, value: Any = None) -> tuple[Any, ...]:
        """Return the values of all ranks, in order, once all have called this.

        Raises CollectiveError if they do not call it for the same `what`, if one has not come in time, or at the end.
        """
        if not self._barrier.broken:
            self._given[rank] = what, value
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            late = ", ".join(str(other) for other in range(self.size) if other not in self._given)
            late = f"rank {late} did not come to {what} within {self._seconds:g} s, for which others waited"
            self._ended = self._ended or late
            raise CollectiveError(f"rank {rank}, {what}: {self._ended}") from None
        return self._all  # of this round: the next one closes when all threads have come again

    def end(self) -> None:
        """Let every call raise, also those that wait."""
        self._ended = self._ended or "the communicator was aborted"
        self._barrier.abort()

    def _close_round(self) -> None:
        asked = {rank: what for rank, (what, _) in sorted(self._given.items())}
        if len(set(asked.values())) > 1:
            differ = "; ".join(f"rank {rank}: {what}" for rank, what in asked.items())
            self._ended = f"the ranks call different collectives ({differ})"
            raise threading.BrokenBarrierError
        self._all = tuple(value for _, (_, value) in sorted(self._given.items()))
        self._given = {}


class CopiesComm(ExchangingComm):
    """The `Comm` of a rank."""

    def __init__(self, meeting: Meeting, rank: int, device: int = 0) -> None:
        super().__init__(rank, meeting.size, device)
        self._meeting = meeting

    def barrier(self, stream: int) -> None:
        self._exchange("barrier", stream)

    def abort(self) -> None:
        self._meeting.end()

    def _exchange(self, what: str, stream: int, *stages: tuple[Sequence[Item], Use]) -> None:
        """The ranks meet before each stage and at the end."""
        with current(stream, self.device):
            for items, use in stages:
                ranks = self._meet(what, [given for given, _ in items], stream)
                use([tensor(given[self.rank], stream) for given in of_ranks] for of_ranks in zip(*ranks, strict=True))
            self._meet(what, None, stream)

    def _meet(self, what: str, given: Any, stream: int) -> Sequence[Any]:
        """Return what all ranks have given, once they are all here."""
        event = torch.cuda.current_stream().record_event() if stream else None
        ranks = self._meeting.exchange(self.rank, what, (given, event))
        for rank, (_, other) in enumerate(ranks) if stream else ():
            if rank != self.rank:
                torch.cuda.current_stream().wait_event(other)
        return [value for value, _ in ranks]


def connect(devices: Sequence[int], seconds: float = SECONDS) -> tuple[CopiesComm, ...]:
    """Return a communicator for each rank of a process, in order. `devices` may repeat."""
    meeting = Meeting(len(devices), seconds)
    return tuple(CopiesComm(meeting, rank, device) for rank, device in enumerate(devices))
