"""The interface between a worker and its executor, the same for all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .readings import Reading


class Executor(Protocol):
    """Runs programs, by name, in planned buffers on one device.

    On a GPU programs are enqueued on `stream`. On a CPU they are done when `run` returns, and there is nothing to
    connect, capture, wait for or release.
    """

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the programs; None on a CPU."""

    @property
    def captured(self) -> tuple[str, ...]:
        """Names of the programs that run as CUDA graphs."""

    def run(self, program: str, labels: int | None = None) -> None:
        """Enqueue `program`, without the launches that a batch with `labels` labels does not need. None: with all."""

    def walk(self, program: str, after: Callable[[int], None], labels: int | None = None) -> None:
        """Run op by op, never as a graph. Calls `after` with the index of each op once it is enqueued, but not of those
        that other ranks own."""

    def readings(self, values: Sequence[Tensor]) -> Callable[[], Reading]:
        """Return what reads these scalars as they are once all work enqueued so far is done.

        Call this once, before the first step, and what it returns after each step.
        """

    def connect(self) -> None:
        """Set up the connections to the other workers, which must call this at the same time. Overwrites buffers."""
        return

    def capture(self) -> None:
        """Capture the programs as CUDA graphs. `run` replays them from then on."""
        return

    def wait(self) -> None:
        """Wait on the host until all enqueued programs are done."""
        return

    def synchronize(self) -> None:
        """Wait on the host until all work on the device is done, including copies into the buffers."""
        return

    def release(self) -> None:
        """Free what communicators wait for. Nothing can run afterwards."""
        return
