"""Loss, gradient norm and other figures of a step: read without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import Protocol

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

    def values(self) -> tuple[float, ...]:
        """Wait for the step. Return (loss, 2-norm of the gradient before clipping, the loss's other figures)."""

    @property
    def finished_at(self) -> float:
        """When the device finished the step, in seconds of `time.perf_counter`. Call `values` first.

        It is not the time at which `values` returned: the loop reads a step while the next one is queued, often much
        later.
        """


class Readings(Protocol):
    """Reads the same scalars at the end of each step."""

    def enqueue(self) -> Reading:
        """Return a reading of the values as they are once all work enqueued so far is done."""


class HostReadings:
    """Readings on a CPU, which are ready at once."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = values

    def enqueue(self) -> ReadyReading:
        return ReadyReading(tuple(map(float, self._values)))


class ReadyReading:
    """The reading of a step that is done."""

    ready = True

    def __init__(self, values: tuple[float, ...]) -> None:
        self._values = values
        self.finished_at = time.perf_counter()

    def values(self) -> tuple[float, ...]:
        return self._values


class DeviceReadings:
    """Readings on a GPU, copied to pinned memory on `stream`: a ring of READINGS that are used in turn."""

    def __init__(self, values: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        ring = [PendingReading(values, stream) for _ in range(READINGS)]
        for previous, reading in zip([ring[-1], *ring], ring, strict=False):
            reading.previous = previous
        self._ring = cycle(ring)

    def enqueue(self) -> PendingReading:
        reading = next(self._ring)
        reading.enqueue()
        return reading


class PendingReading:
    """Pinned memory that receives a step's loss and gradient norm asynchronously."""

    def __init__(self, values: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        self._values = values
        self._stream = stream
        self._host = [torch.empty(v.shape, dtype=v.dtype, pin_memory=True) for v in values]
        self._event = torch.cuda.Event(enable_timing=True)
        self._finished_at: float | None = None
        self.previous: PendingReading | None = None
        """The reading of the step before."""
        self.enqueue()  # the first record creates the event

    def enqueue(self) -> None:
        """Copy the values as they are once all work enqueued so far is done."""
        self._finished_at = None
        with torch.cuda.stream(self._stream):
            for host, value in zip(self._host, self._values, strict=True):
                host.copy_(value, non_blocking=True)
            self._event.record(self._stream)

    @property
    def ready(self) -> bool:
        return bool(self._event.query())

    def values(self) -> tuple[float, ...]:
        if self._finished_at is None:
            finished_earlier = self._event.query()
            self._event.synchronize()
            now = time.perf_counter()
            self._finished_at = min(now, self._after_previous() or now) if finished_earlier else now
        return tuple(map(float, self._host))

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
