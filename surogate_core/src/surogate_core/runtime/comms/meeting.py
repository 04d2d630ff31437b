"""A meeting of the threads of a process, one for each rank, at which they exchange values."""

from __future__ import annotations

import threading
from typing import Any

from ...api.world import CollectiveError

SECONDS = 3600.0
"""For which a rank waits for the others in a collective. What watches the run ends it much earlier, unless a rank does
something that may take long."""


class Meeting:
    """Where `size` threads exchange values, any number of times, until one fails or `end` is called."""

    def __init__(self, size: int, seconds: float = SECONDS) -> None:
        self.size = size
        self._seconds = seconds
        self._changed = threading.Condition()
        self._given: dict[int, tuple[str, Any]] = {}
        self._all: tuple[Any, ...] = ()
        self._round = 0
        self._ended = ""

    def exchange(self, rank: int, what: str, value: Any = None) -> tuple[Any, ...]:
        """Return the values of all ranks, in order, once all have called this.

        Raises CollectiveError if they do not call it for the same `what`, if one has not come in time, or at the end.
        """
        with self._changed:
            self._refuse_ended(rank, what)
            now = self._round
            self._given[rank] = what, value
            if len(self._given) == self.size:
                self._close_round()
            elif not self._changed.wait_for(lambda: self._round != now or self._ended, self._seconds):
                late = ", ".join(str(other) for other in range(self.size) if other not in self._given)
                self._end(f"rank {late} did not come to {what} within {self._seconds:g} s, for which others waited")
            if self._round == now:
                self._refuse_ended(rank, what)
            return self._all

    def end(self) -> None:
        """Let every call raise, also those that wait."""
        with self._changed:
            self._end("the communicator was aborted")

    def _close_round(self) -> None:
        asked = {rank: what for rank, (what, _) in sorted(self._given.items())}
        if len(set(asked.values())) > 1:
            differ = "; ".join(f"rank {rank}: {what}" for rank, what in asked.items())
            self._end(f"the ranks call different collectives ({differ})")
            return
        self._all = tuple(value for _, (_, value) in sorted(self._given.items()))
        self._given = {}
        self._round += 1
        self._changed.notify_all()

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        self._changed.notify_all()

    def _refuse_ended(self, rank: int, what: str) -> None:
        if self._ended:
            raise CollectiveError(f"rank {rank}, {what}: {self._ended}")
