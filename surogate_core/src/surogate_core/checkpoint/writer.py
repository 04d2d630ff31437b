"""When a checkpoint is written: by a thread, from copies in host memory, while training goes on; or while it waits.

The loop calls `save` and then, before every step, `look`. What the thread could not do is raised there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..machine.system import available_memory_bytes
from ..memory.devices import GIB
from ..reporting.terminal import ignoring_broken_pipe
from ..reporting.text import step_time_text

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoint.progress import Progress
    from ..program.value import Value
    from ..runtime.host_copy import HostCopy
    from ..runtime.team import Team
    from ..runtime.worker import Worker

View = Callable[["Value"], "Tensor"]

Write = Callable[[int, "Progress", View], Path]
"""Make the checkpoint of a step from where its values are, remove what it replaces, and return its folder."""

SPARE_BYTES = 1 * GIB
"""Host memory that copies leave to everybody else."""


class Saves(Protocol):
    """How a run writes its checkpoints."""

    def save(self, step: int, progress: Progress) -> None:
        """Write, or begin to write, the weights as they are, which are those after `step`."""
        ...

    def poll(self) -> None:
        """Tell of a save that has become whole; raise what kept it from that."""
        ...

    def wait(self) -> None:
        """`look`, once nothing is being written any more."""
        ...

    def close(self) -> None:
        """End without waiting. What is being written may stay half-written, under a name that says so."""
        ...


class ForegroundSaves:
    """Training waits until a checkpoint is whole."""

    def __init__(self, worker: Worker | Team, write: Write, notice: Callable[[str], None]) -> None:
        self._worker, self._write, self._notice = worker, write, ignoring_broken_pipe(notice)

    def save(self, step: int, progress: Progress) -> None:
        began = time.perf_counter()
        self._worker.settle()
        path = self._write(step, progress, self._worker.buffers.persistent)
        self._notice(_saved(path, time.perf_counter() - began))

    def poll(self) -> None:
        """Nothing is under way."""

    def wait(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True)
class _UnderWay:
    step: int
    began: float
    future: Future[tuple[Path, float]]


class BackgroundSaves:
    """A thread writes from `copied`, which the worker has copied its values into; one checkpoint at a time."""

    def __init__(self, worker: Worker | Team, copied: HostCopy, write: Write, notice: Callable[[str], None]) -> None:
        from ..runtime.threads import RankThread

        self._worker, self._copied, self._write = worker, copied, write
        self._notice = ignoring_broken_pipe(notice)
        self._thread = RankThread("surogate-saves")
        self._under_way: _UnderWay | None = None

    def save(self, step: int, progress: Progress) -> None:
        self.poll()
        if self._under_way is not None:
            before, began = self._under_way.step, time.perf_counter()
            self.wait()
            waited = step_time_text((time.perf_counter() - began) * 1000)
            self._notice(f"step {step} waited {waited} to be saved, for step {before}: a larger save_steps avoids it")
        self._worker.snapshot()
        then = copy.deepcopy(progress)
        self._under_way = _UnderWay(step, time.perf_counter(), self._thread.submit(self._make, step, then))

    def poll(self) -> None:
        if self._under_way is not None and self._under_way.future.done():
            self.wait()

    def wait(self) -> None:
        under_way = self._under_way
        if under_way is None:
            return
        try:
            path, finished = under_way.future.result()
        finally:  # whoever stops waiting does not begin again
            self._under_way = None
        self._notice(_saved(path, finished - under_way.began, " beside the steps"))

    def close(self) -> None:
        self._thread.close()

    def _make(self, step: int, progress: Progress) -> tuple[Path, float]:
        self._copied.wait()
        return self._write(step, progress, self._copied.view), time.perf_counter()


def open_saves(
    worker: Worker | Team,
    values: list[Value],
    write: Write,
    notice: Callable[[str], None],
    *,
    wanted: bool,
) -> Saves:
    """In the background if that is `wanted` and host memory suffices for copies of `values`; to be called before
    `worker.start`. `notice` is told where it does not."""
    if not wanted:
        return ForegroundSaves(worker, write, notice)
    from ..runtime.host_copy import NoHostMemory, copied_bytes

    needed, free = copied_bytes(values), available_memory_bytes()
    try:
        if needed + SPARE_BYTES > free:
            raise NoHostMemory(f"{free / GIB:.1f} GiB are free")
        copied = worker.allocate_snapshot(values)
    except NoHostMemory as error:
        notice(
            f"saves stop the training while they write: copies of what is saved would take {needed / GIB:.1f} GiB of "
            f"host memory, and {error}"
        )
        return ForegroundSaves(worker, write, notice)
    return BackgroundSaves(worker, copied, write, notice)


def _saved(path: Path, seconds: float, beside: str = "") -> str:
    return f"saved {path.name} in {step_time_text(seconds * 1000)}{beside}"
