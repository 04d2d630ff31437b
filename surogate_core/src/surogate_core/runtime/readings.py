"""Loss, gradient norm and other figures of a step, and tables: read without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

READINGS = 4
"""Readings that may be pending at once. Their memory is allocated before the first step, because nothing may be
allocated later."""


class Reading(Protocol):
    """Loss and gradient norm of a step that may still be running. Valid until three more steps have begun."""

    @property
    def ready(self) -> bool:
        """Whether `values` would return without waiting."""

    def values(self) -> tuple[Any, ...]:
        """Wait for the step. Return (loss, 2-norm of the gradient before clipping, values of the other figures)."""

    @property
    def finished_at(self) -> float:
        """When the device finished the step, in seconds of `time.perf_counter`. Call `values` first.

        It is not the time at which `values` returned: the loop reads a step while the next one is queued, often much
        later.
        """


def to_number(value: Tensor) -> Any:
    """Return a float, or the numpy array of a figure that has several."""
    return np.array(value.tolist()) if value.ndim else float(value)


class ReadyReading:
    """The reading of a step that is done, as all are on a CPU."""

    ready = True

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values
        self.finished_at = time.perf_counter()

    def values(self) -> tuple[Any, ...]:
        return self._values


class HostCopyOf:
    """Memory of the host that receives values asynchronously, pinned if `stream` is one of a GPU.

    Valid until READINGS - 1 more copies of the same values have been enqueued.
    """

    def __init__(self, values: Sequence[Tensor], stream: torch.cuda.Stream | None, *, timing: bool = False) -> None:
        self._values = values
        self._stream = stream
        self._host = [torch.empty(v.shape, dtype=v.dtype, pin_memory=stream is not None) for v in values]
        self._event = None if stream is None else torch.cuda.Event(enable_timing=timing)

    def enqueue(self) -> None:
        """Copy the values as they are once all work enqueued so far is done."""
        with torch.cuda.stream(self._stream):
            for host, value in zip(self._host, self._values, strict=True):
                host.copy_(value, non_blocking=self._event is not None)
            if self._event is not None:
                self._event.record(self._stream)


class TableReading(HostCopyOf):
    """A reading of a table that some steps write."""

    def values(self) -> list[list[float]]:
        """Wait for the copy. Return its rows."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[float]] = self._host[0].tolist()
        return rows


class PendingReading(HostCopyOf):
    """A step's loss and gradient norm on a GPU."""

    _event: torch.cuda.Event

    def __init__(self, values: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        super().__init__(values, stream, timing=True)
        self._finished_at: float | None = None
        self.previous: PendingReading | None = None
        """The reading of the step before."""
        self.enqueue()  # the first record creates the event

    def enqueue(self) -> None:
        self._finished_at = None
        super().enqueue()

    @property
    def ready(self) -> bool:
        return bool(self._event.query())

    def values(self) -> tuple[Any, ...]:
        if self._finished_at is None:
            finished_earlier = self._event.query()
            self._event.synchronize()
            now = time.perf_counter()
            self._finished_at = min(now, self._after_previous() or now) if finished_earlier else now
        return tuple(map(to_number, self._host))

    @property
    def finished_at(self) -> float:
        assert self._finished_at is not None, "call `values` first"
        return self._finished_at

    def _after_previous(self) -> float | None:
        """The end of the step before plus the time between the two events.

        A step that the host waited for is timed by the host's clock, so the two clocks cannot drift apart.
        """
        previous = self.previous
        if previous is None or previous._finished_at is None:
            return None
        return previous._finished_at + previous._event.elapsed_time(self._event) / 1000


Copied = TypeVar("Copied", bound=HostCopyOf)


def in_turn(ring: Sequence[Copied]) -> Callable[[], Copied]:
    """Return what enqueues and returns one of `ring` after another."""
    turn = cycle(ring)

    def enqueue() -> Copied:
        reading = next(turn)
        reading.enqueue()
        return reading

    return enqueue


def table_readings(table: Tensor, stream: torch.cuda.Stream | None) -> Callable[[], TableReading]:
    """Return what reads the same table after different steps. Its pinned memory is allocated here."""
    return in_turn([TableReading([table], stream) for _ in range(READINGS)])


def device_readings(values: Sequence[Tensor], stream: torch.cuda.Stream) -> Callable[[], PendingReading]:
    """Return what reads the same values on a GPU at the end of each step. Its pinned memory is allocated here."""
    ring = [PendingReading(values, stream) for _ in range(READINGS)]
    for previous, reading in zip([ring[-1], *ring], ring, strict=False):
        reading.previous = previous
    return in_turn(ring)
