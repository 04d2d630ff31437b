"""A table that some steps write: read without making the host wait for the device."""

from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor

from .readings import READINGS


class TableReading:
    """Host memory that receives the table of a step. Valid until READINGS - 1 more have been enqueued."""

    def __init__(self, table: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._table = table
        self._stream = stream
        self._host = torch.empty(table.shape, dtype=table.dtype, pin_memory=stream is not None)
        self._event = None if stream is None else torch.cuda.Event()

    def enqueue(self) -> None:
        """Copy the table as it is once all work enqueued so far is done."""
        if self._stream is None or self._event is None:
            self._host.copy_(self._table)
            return
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._table, non_blocking=True)
            self._event.record(self._stream)

    def values(self) -> list[list[float]]:
        """Wait for the copy. Return its rows."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[float]] = self._host.tolist()
        return rows


class TableReadings:
    """Reads the same table after different steps: a ring of READINGS that are used in turn.

    `stream` is that of the programs; None on a CPU. The pinned memory is allocated here.
    """

    def __init__(self, table: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._ring = cycle([TableReading(table, stream) for _ in range(READINGS)])

    def enqueue(self) -> TableReading:
        reading = next(self._ring)
        reading.enqueue()
        return reading
