"""The position of a device, written by its own streams: also by CUDA graphs, which the host cannot look into."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..api.world import Position
from .comms.spans import current, tensor

_MICRO_STEP, _MARK = 0, 1

_PAGES: list[mmap.mmap] = []
"""Pinned until the process ends: a graph may write to them as long as it lives."""


class DevicePosition(Position):
    """The `Position` of a rank whose collectives are enqueued. A kernel on the stream writes it to pinned memory.

    A mark is twice the number of a collective's name, and odd while the device is inside.
    """

    def __init__(self, device: int) -> None:
        super().__init__()
        self._device = device
        self._numbers: dict[str, int] = {"": 0}
        self._cells: Tensor | None = None

    def micro_step(self, number: int, stream: int) -> None:
        self._moves += 1
        self._write(_MICRO_STEP, number, stream)

    @contextmanager
    def collective(self, name: str, stream: int) -> Iterator[None]:
        number = self._numbers.setdefault(name, len(self._numbers))
        self._write(_MARK, 2 * number + 1, stream)
        yield
        self._write(_MARK, 2 * number, stream)

    def read(self) -> tuple[int, int, str, bool]:
        micro_step, mark = (0, 0) if self._cells is None else self._cells.tolist()
        name = next(name for name, number in self._numbers.items() if number == mark // 2)
        return hash((self._moves, micro_step, mark)), micro_step, name, bool(mark % 2)

    def _write(self, cell: int, value: int, stream: int) -> None:
        if self._cells is None:
            self._cells = _pinned_cells(self._device)
        span = self._cells.data_ptr() + cell * self._cells.element_size(), 1, "int64"
        with current(stream, self._device):
            tensor(span, stream).fill_(value)


def _pinned_cells(device: int) -> Tensor:
    """Return two integers that a device can write, in a page of their own.

    Pinned memory of torch may come back from another device. A tensor at its address then belongs to that device, whose
    streams would write it, in no order with the collectives.
    """
    page = mmap.mmap(-1, mmap.PAGESIZE)
    cells = torch.frombuffer(page, dtype=torch.int64, count=2)
    if torch.cuda.is_available():
        with torch.cuda.device(device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(cells.data_ptr(), mmap.PAGESIZE, 0))
        _PAGES.append(page)
    return cells
