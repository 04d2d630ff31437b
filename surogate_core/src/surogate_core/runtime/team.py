"""A team: several ranks of one process, each driven by its own thread, used by the loop as if they were one worker.

All ranks, also those of other processes, run the same steps and sum their gradients. Each call of the loop is queued on
every rank's thread and is not waited for unless it returns a result. Ranks decide nothing: interrupts, evaluations and
saves happen between two steps of the loop, on which the processes agree.

A failed rank is detected at the next call, or while the team waits for a reading. The kernels of the other ranks may
wait for it forever. The team aborts all communicators, which ends these kernels, and raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from itertools import zip_longest
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from ..api import Comm
from ..assembly.staging import Staged
from ..batch import MicroBatch
from ..errors import RunLost, RunStopped, SurogateError
from ..program.value import Value
from .arena import Buffers
from .host_copy import TeamCopy, saved_by
from .host_memory import NoHostMemory
from .pieces import Pieces, pieces_of
from .readings import Reading, TableReading
from .threads import RankThread, join
from .worker import Watcher, Worker

POLL_SECONDS = 0.0005
"""Interval between two checks of a reading. Steps take milliseconds, and the next one is already queued."""

CHECK_SECONDS = 0.1
"""Interval between two checks for failures while the team waits for threads."""

CLOSE_SECONDS = 3.0
"""Seconds for which `close` waits for threads."""

Result = TypeVar("Result")


class Team:
    """One worker for each communicator. The methods are those of `Worker`.

    Life: construct, which enqueues no collective; fill `buffers` and `params()`, which are those of the first rank;
    `start()`, then steps and evaluations, then `close()`.

    If a rank has failed, every method raises RunStopped with rank, device and error. A SurogateError of a rank is
    raised unchanged, because it already says who must act.
    """

    def __init__(
        self, comms: Sequence[Comm], make: Callable[[Comm], Worker], others: Callable[[], None] = lambda: None
    ) -> None:
        """`others` raises if another process has failed."""
        self._comms = comms
        self._others = others
        self._threads = [RankThread(f"surogate-rank-{comm.rank}") for comm in comms]
        self._workers: list[Worker] = []
        try:
            made = [thread.submit(make, comm) for thread, comm in zip(self._threads, comms, strict=True)]
            self._workers = self._results(made)
        except BaseException:
            self.close()
            raise

    @property
    def width(self) -> int:
        """Number of micro-batches that `micro_step` takes: one for each rank of this process."""
        return len(self._threads)

    @property
    def _ranks(self) -> range:
        first = self._comms[0].rank
        return range(first, first + len(self._comms))

    @property
    def world_size(self) -> int:
        return self._comms[0].world_size

    @property
    def buffers(self) -> Buffers:
        """The buffers of the first rank, which are filled at the start and saved."""
        return self._workers[0].buffers

    def params(self) -> dict[str, Tensor]:
        """Return the whole weights of the first rank. After `gather` those of all ranks are bit-identical."""
        return self._workers[0].params()

    def pieces(self, value: Value) -> Pieces:
        workers = {comm.rank: worker for comm, worker in zip(self._comms, self._workers, strict=True)}
        return pieces_of(value, lambda rank: workers[rank].buffers.persistent(value), self._ranks)

    def stored(self) -> dict[str, tuple[Tensor, ...]]:
        return self._workers[0].stored()

    def staged(self, part: Staged) -> dict[str, Tensor]:
        return self._workers[0].staged(part)

    def derive(self, part: Staged) -> None:
        """Make derived states on the first rank, from which `start` shares them, or on all. See `Worker.derive`."""
        if part.divides:
            self._on_all(lambda worker: worker.derive(part))
        else:
            self._results([self._threads[0].submit(self._workers[0].derive, part)])

    def staged_states(self, part: Staged) -> dict[str, tuple[Tensor, ...]]:
        return self._workers[0].staged_states(part)

    def divide(self, part: Staged, stored: Collection[str]) -> None:
        self._on_all(lambda worker: worker.divide(part, stored))

    def watch(self, make: Callable[[Buffers], Watcher]) -> None:
        """Watch every rank. Each has its own watcher, which is called on the rank's thread."""
        self._on_all(lambda worker: worker.watch(make))

    def restored(self, *, lr: float, step: int, skipped: int = 0) -> None:
        self._on_all(lambda worker: worker.restored(lr=lr, step=step, skipped=skipped))

    def start(self, *, graphs: bool = True) -> None:
        """Give all ranks, also those of other processes, the weights and states of rank 0, then start all.

        All ranks finish a stage before any begins the next. While a collective waits for a peer on one device, no other
        thread may allocate, load modules or map memory, because the driver may block it until the collective ends.
        While a rank captures, no other may wait for the whole device, which they may share. Collectives run once on
        what the ranks share, because states that collect a maximum would keep what warming up has left in them.
        """
        self._on_all(lambda worker: worker.share())
        self._on_all(lambda worker: worker.connect())
        if self._workers[0].starts_adapter:
            self._on_all(lambda worker: worker.start_adapter())
            self._on_all(lambda worker: worker.share())  # another processor may round in another way
        self._on_all(lambda worker: worker.prepare())
        self._on_all(lambda worker: worker.begin(graphs=graphs))

    def micro_step(self, *batches: MicroBatch, index: int, **settings: Any) -> None:
        """Run one micro-batch on each rank, as `Worker.micro_step` does.

        `index` is that of rank 0; the others have the following ones.
        """
        for thread, worker, comm, batch in zip(self._threads, self._workers, self._comms, batches, strict=True):
            thread.submit(worker.micro_step, batch, index=index + comm.rank, **settings)
        self.check()

    def update(self, *, lr: float, step: int) -> Reading:
        """Apply the summed gradient on every rank. The reading is ready when those of all ranks are."""
        pairs = zip(self._threads, self._workers, strict=True)
        readings = [thread.submit(worker.update, lr=lr, step=step) for thread, worker in pairs]
        self.check()
        return _TeamReading(self, readings)

    def read_numerics(self) -> _TeamTable:
        """Read the numerics report of the first rank. See `Worker.read_numerics`."""
        return _TeamTable(self._threads[0].submit(self._workers[0].read_numerics))

    def evaluate(self, *batches: MicroBatch) -> tuple[Any, ...]:
        """Return the sums of the figures over all batches, one for each rank of this process."""
        given = zip(self._threads, self._workers, batches, strict=True)
        found = self._results([thread.submit(worker.evaluate, batch) for thread, worker, batch in given])
        return tuple(map(sum, zip(*found, strict=True)))

    def cached(self) -> list[Tensor]:
        return [of_rank for found in self._on_all(lambda worker: worker.cached()) for of_rank in found]

    def gather(self) -> None:
        self._on_all(lambda worker: worker.gather())

    def settle(self) -> None:
        self._on_all(lambda worker: worker.settle())

    def allocate_snapshot(self, values: Iterable[Value]) -> TeamCopy:
        kept = list(values)
        own = {rank: saved_by(rank, kept) for rank in self._ranks}
        try:
            pairs = zip(self._workers, own.items(), strict=True)
            copies = {rank: worker.allocate_snapshot(values) for worker, (rank, values) in pairs if values}
        except NoHostMemory:
            for worker in self._workers:
                worker.free_snapshot()
            raise
        return TeamCopy(copies, self._ranks)

    def snapshot(self) -> None:
        self._on_all(lambda worker: worker.snapshot())

    def close(self) -> None:
        """Abort the communicators and end the threads. Returns within seconds even if a thread is blocked.

        The process must then be ended by `threads.leave_if_stuck`.
        """
        self.abort()
        for thread, worker in zip_longest(self._threads, self._workers):
            thread.close(last=worker.close if worker else None)
        join(self._threads, CLOSE_SECONDS)

    # ------------------------------------------------------------------------------------------------------- failures

    def check(self) -> None:
        """Raise if a rank, its communicator or another process has failed."""
        self._others()
        failed = [(t.failure, rank) for rank, t in enumerate(self._threads) if t.failure is not None]
        if failed:
            failure, rank = min(failed, key=lambda pair: pair[0].time)  # later failures may be consequences
            self.fail(rank, failure.error)
        for rank, comm in enumerate(self._comms):
            try:
                comm.check()
            except Exception as error:
                self.fail(rank, error)

    def abort(self) -> None:
        """Abort the communicators, which ends kernels and calls that wait for others. May be called on any thread."""
        for comm in self._comms:
            comm.abort()

    def fail(self, rank: int, error: BaseException) -> NoReturn:
        """Abort the communicators, which ends kernels that wait for `rank`, and raise its error."""
        self.abort()
        if isinstance(error, SurogateError):
            raise error
        comm = self._comms[rank]
        raise RunLost(
            f"rank {comm.rank} of {comm.world_size} (device {comm.device}) failed: {type(error).__name__}: {error}. "
            "The other ranks were stopped, and nothing of the current step is saved. Earlier checkpoints are complete."
        ) from error

    # -------------------------------------------------------------------------------------------------------- threads

    def _on_all(self, work: Callable[[Worker], Result]) -> list[Result]:
        return self._results([t.submit(work, w) for t, w in zip(self._threads, self._workers, strict=True)])

    def _results(self, futures: Iterable[Future[Result]]) -> list[Result]:
        awaited = list(futures)
        while True:
            _, running = wait(awaited, timeout=CHECK_SECONDS, return_when=FIRST_EXCEPTION)
            self.check()
            if not running:
                return [future.result() for future in awaited]


AnyWorker = Worker | Team
"""The worker of one rank, or the workers of several."""


class _TeamTable:
    """The numerics report of the first rank. Read it after the step's reading, which polls for failures."""

    def __init__(self, reading: Future[TableReading | None]) -> None:
        self._reading = reading

    def values(self) -> list[list[float]] | None:
        reading = self._reading.result()
        return None if reading is None else reading.values()


class _TeamReading:
    """The readings of a step on all ranks. Polled, because a wait for one would not detect that another has failed."""

    def __init__(self, team: Team, readings: Sequence[Future[Reading]]) -> None:
        self._team = team
        self._readings = readings

    @property
    def ready(self) -> bool:
        self._team.check()
        ready = [future.done() and self._is_ready(rank, future) for rank, future in enumerate(self._readings)]
        return all(ready)  # all ranks were asked, because one that has failed may be why another is not ready

    def _is_ready(self, rank: int, future: Future[Reading]) -> bool:
        try:
            return future.result().ready
        except Exception as error:  # CUDA reports the error of a kernel at the next call for its device
            self._team.fail(rank, error)

    @property
    def finished_at(self) -> float:
        """When the last rank finished the step."""
        return max(future.result().finished_at for future in self._readings)

    def values(self) -> tuple[Any, ...]:
        while not self.ready:
            time.sleep(POLL_SECONDS)
        values = [future.result().values() for future in self._readings]
        if len(set(map(repr, values))) > 1:
            found = "; ".join(f"rank {rank}: loss {v[0]}, norm {v[1]}" for rank, v in enumerate(values))
            raise RunStopped(
                f"the ranks disagree on a step although they have summed their gradients ({found}): an op of the "
                "update gives different bits on different devices, so the weights diverge. Please report this; use "
                "gpus: 1 until it is fixed."
            )
        return values[0]
