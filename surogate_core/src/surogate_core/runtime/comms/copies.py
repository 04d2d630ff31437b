"""Ranks that are threads of one process and read each other's memory: that of the host, of one GPU, or of peers.

On a GPU the hosts of the ranks meet in each call and exchange events, which their streams then wait for. An event has
been recorded before a stream waits for it, so no stream waits for work that is not enqueued yet: ranks on one GPU need
not run at the same time, and cannot block each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .exchange import ExchangingComm, Item, Use
from .meeting import SECONDS, Meeting
from .spans import current, tensor


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
