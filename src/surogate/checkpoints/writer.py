"""When a checkpoint is written: in the background by a thread, from a copy in host memory, or while training waits.

The loop calls `save`, and `poll` before every step. An error of the thread is raised in the loop, by the next call.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from surogate_core.machine.devices import GIB

from ..reporting.terminal import ignoring_broken_pipe
from ..reporting.text import step_time_text

if TYPE_CHECKING:
    from surogate_core.program.value import Value
    from surogate_core.runtime.host_copy import HostCopy, TeamCopy
    from surogate_core.runtime.pieces import Pieces
    from surogate_core.runtime.team import AnyWorker

    from .progress import Progress

View = Callable[["Value"], "Pieces"]

Write = Callable[[int, "Progress", View], str]
"""(step, progress, view) -> what it has written from `view(value)`: "step_00000050". Also removes old checkpoints."""

SPARE_BYTES = 1 * GIB
"""Host memory that must stay free in addition to the copy."""


class CheckpointWriter(Protocol):
    """Writes the checkpoints of a run, one at a time."""

    def save(self, step: int, progress: Progress) -> None:
        """Write, or begin to write, the current weights, which are those after `step`."""

    def poll(self) -> None:
        """Give notice if the current save has finished; raise its error if it failed. Does not wait."""
        return

    def wait(self) -> None:
        """Wait for the current save, then `poll`."""
        return

    def close(self) -> None:
        """Stop without waiting. An unfinished checkpoint keeps its temporary name."""
        return


class ForegroundWriter(CheckpointWriter):
    """Writes checkpoints while training waits."""

    def __init__(self, worker: AnyWorker, write: Write, notice: Callable[[str], None]) -> None:
        self._worker, self._write, self._notice = worker, write, ignoring_broken_pipe(notice)

    def save(self, step: int, progress: Progress) -> None:
        began = time.perf_counter()
        self._worker.settle()
        written = self._write(step, progress, self._worker.pieces)
        self._notice(_saved(written, time.perf_counter() - began))


@dataclass(frozen=True)
class _Save:
    """A save that the thread has begun. `future` is what it has written and when it finished."""

    step: int
    began: float
    future: Future[tuple[str, float]]


class BackgroundWriter:
    """Writes checkpoints in a thread, from `snapshot`, into which the worker copies its values."""

    def __init__(
        self, worker: AnyWorker, snapshot: HostCopy | TeamCopy, write: Write, notice: Callable[[str], None]
    ) -> None:
        from surogate_core.runtime.threads import RankThread

        self._worker, self._snapshot, self._write = worker, snapshot, write
        self._notice = ignoring_broken_pipe(notice)
        self._thread = RankThread("surogate-saves")
        self._current: _Save | None = None

    def save(self, step: int, progress: Progress) -> None:
        self.poll()
        if self._current is not None:
            previous, began = self._current.step, time.perf_counter()
            self.wait()
            waited = step_time_text((time.perf_counter() - began) * 1000)
            self._notice(f"step {step} waited {waited} for the save of step {previous}: saving less often avoids it")
        self._worker.snapshot()
        then = copy.deepcopy(progress)
        self._current = _Save(step, time.perf_counter(), self._thread.submit(self._run, step, then))

    def poll(self) -> None:
        if self._current is not None and self._current.future.done():
            self.wait()

    def wait(self) -> None:
        current = self._current
        if current is None:
            return
        try:
            written, finished = current.future.result()
        finally:  # after an interrupt or an error nobody waits for this save again
            self._current = None
        self._notice(_saved(written, finished - current.began, " in the background"))

    def close(self) -> None:
        self._thread.close()

    def _run(self, step: int, progress: Progress) -> tuple[str, float]:
        try:
            self._snapshot.wait()
            return self._write(step, progress, self._snapshot.pieces), time.perf_counter()
        finally:
            self._snapshot.release()


def open_writer(
    worker: AnyWorker,
    values: list[Value],
    write: Write,
    notice: Callable[[str], None],
    *,
    background: bool,
    free: int,
    ranks: Sequence[int] = (0,),
) -> CheckpointWriter:
    """Return a background writer if `background` is set and `free` bytes of host memory suffice for a copy of `values`.

    `values` are those of the run, of which the `ranks` of this process hold what they save. Otherwise return a
    foreground writer; `notice` is called with the reason if host memory does not suffice. Call it
    before `worker.start`.
    """
    if not background:
        return ForegroundWriter(worker, write, notice)
    from surogate_core.runtime.host_copy import copied_bytes, saved_by
    from surogate_core.runtime.host_memory import NoHostMemory

    needed = sum(copied_bytes(saved_by(rank, values)) for rank in ranks)
    try:
        if needed + SPARE_BYTES > free:
            raise NoHostMemory(f"{free / GIB:.1f} GiB are free")
        snapshot = worker.allocate_snapshot(values)
    except NoHostMemory as error:
        notice(
            f"training waits for each save: copies of the saved tensors would take {needed / GIB:.1f} GiB of host "
            f"memory, and {error}"
        )
        return ForegroundWriter(worker, write, notice)
    return BackgroundWriter(worker, snapshot, write, notice)


def _saved(written: str, seconds: float, where: str = "") -> str:
    return f"saved {written} in {step_time_text(seconds * 1000)}{where}"
