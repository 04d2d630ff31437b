"""A meeting of the threads of a process, one for each rank, at which they exchange values."""

from __future__ import annotations

import threading
from typing import Any

from ...api.world import CollectiveError

SECONDS = 3600.0
"""For which a rank waits for the others in a collective. What watches the run ends it much earlier, unless a rank does
something that may take long."""


class Meeting:
    """A place where `size` threads exchange values, any number of times, until one fails or `end` is called."""

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
