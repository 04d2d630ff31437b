"""What the loop writes before a program runs, on its way to the device.

All inputs of a program family lie in one segment, so a micro-step costs one copy. On a GPU the loop writes into pinned
mirrors of that segment, a few in turn: it can be that many micro-steps ahead before it waits for a copy to be done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory.plan import Segment
from ..program.value import Value
from ..reference.rounding import TORCH_DTYPES
from .arena import Buffers

MIRRORS = 4


class Inputs:
    """Write values by name, then `commit`: they are on the device, in order with what is enqueued there."""

    def __init__(self, values: Iterable[Value], segment: Segment, buffers: Buffers, stream: Any | None = None) -> None:
        self._values = {v.name: v for v in values}
        self._segment = segment
        self._target = buffers.segment("input")
        self._stream = stream
        self._turn = 0
        self._dirty = False
        if stream is None:
            self._mirrors = [self._target]
            self._done: list[Any] = []
        else:
            self._mirrors = [torch.zeros(segment.nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(MIRRORS)]
            self._done = [torch.cuda.Event() for _ in self._mirrors]
            for event in self._done:
                event.record(stream)  # which makes it

    def write(self, name: str, value: np.ndarray[Any, Any] | float) -> None:
        """Set an input: an array of its shape, or a number for a scalar."""
        if not self._dirty:
            self._next_mirror()
        view = self._view(self._values[name])
        if isinstance(value, np.ndarray):
            view.copy_(torch.from_numpy(value))
        else:
            view.fill_(value)

    def commit(self) -> None:
        """Make everything written since the last commit what programs read from now on."""
        if self._stream is not None and self._dirty:
            with torch.cuda.stream(self._stream):
                self._target.copy_(self._mirrors[self._turn], non_blocking=True)
                self._done[self._turn].record(self._stream)
        self._dirty = False

    def _next_mirror(self) -> None:
        """Turn to the next mirror, once its last copy is done, and begin with what the one before holds."""
        self._dirty = True
        if self._stream is None:
            return
        before, self._turn = self._turn, (self._turn + 1) % len(self._mirrors)
        self._done[self._turn].synchronize()
        self._mirrors[self._turn].copy_(self._mirrors[before])

    def _view(self, value: Value) -> Tensor:
        offset = self._segment.offsets[value]
        raw = self._mirrors[self._turn][offset : offset + value.nbytes]
        return raw.view(TORCH_DTYPES[value.dtype]).view(value.shape)
