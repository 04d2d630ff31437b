"""Several devices of one process as one worker: a thread for each, the same step on all, gradients summed in between.

The loop drives a `Team` as it drives a `Worker`. What it asks for is queued on every rank's thread and, where there is
nothing to read, not waited for. So a rank never decides anything, and ranks need no agreement: an interrupt, an
evaluation or a save happens between two steps of the one loop.

A rank that fails is noticed at the next call, or while the team waits for a reading; the others may then be waiting for
it on their devices, for ever. The team gives up their collectives, which frees them, and raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from itertools import zip_longest
from typing import NoReturn, TypeVar

from torch import Tensor

from ..api import Comm
from ..data.loader import MicroBatch
from ..errors import RunStopped, SurogateError
from ..program.op import Program
from ..program.value import Value
from .arena import Buffers
from .host_copy import HostCopy
from .threads import RankThread, join
from .worker import Reading, Worker

POLL_SECONDS = 0.0005
"""How often a reading is looked at: against steps of milliseconds, while the next one is queued already."""

NOTICE_SECONDS = 0.1
"""How soon a failure is seen while the team waits for threads."""

CLOSE_SECONDS = 3.0
"""How long the end waits for threads that do not answer."""

Result = TypeVar("Result")


class Team:
    """A worker for each of `comms`, driven together; see `Worker` for what each method does.

    Life: construct (which runs nothing that sums), fill `buffers` and `params()`, which are those of the first rank,
    `start()`, then steps and evaluations, then `close()`.

    Any method raises RunStopped naming rank, device and error when a rank has failed; an error that says itself who
    must act (SurogateError) is raised as it is.
    """

    def __init__(self, comms: Sequence[Comm], make: Callable[[Comm], Worker]) -> None:
        self._comms = comms
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
        """Micro-batches that it takes at once."""
        return len(self._threads)

    @property
    def buffers(self) -> Buffers:
        """Those of the first rank: what is filled at the start and saved."""
        return self._workers[0].buffers

    def params(self) -> dict[str, Tensor]:
        """The first rank's weights; after every step all ranks have the same bits."""
        return self._workers[0].params()

    def watch(self, make: Callable[[Buffers], Callable[[Program, int], None]]) -> None:
        """Every rank with a watcher of its own, called from the rank's thread."""
        self._on_all(lambda worker: worker.watch(make))

    def restored(self, *, lr: float, step: int) -> None:
        """The first rank's states hold what a checkpoint had, saved after an update with `lr` and `step`."""
        self._on_all(lambda worker: worker.restored(lr=lr, step=step))

    def start(self, *, graphs: bool = True) -> None:
        """Give all ranks the weights and states of the first, and start them.

        In stages, each awaited by all: while a collective waits for a peer on one device, another thread must not
        allocate, load modules or map memory on another, for the driver may make it wait for the collective.
        """
        first, *others = self._workers
        self._results(t.submit(w.copy_from, first) for t, w in zip(self._threads[1:], others, strict=True))
        self._on_all(lambda worker: worker.connect())
        self._on_all(lambda worker: worker.start(graphs=graphs))

    def micro_step(self, *batches: MicroBatch, first: bool, last: bool, loss_scale: float, index: int) -> None:
        """A micro-batch for each rank. `index` is that of the first; the others count on from it."""
        for thread, worker, comm, batch in zip(self._threads, self._workers, self._comms, batches, strict=True):
            step = worker.micro_step
            thread.submit(step, batch, first=first, last=last, loss_scale=loss_scale, index=index + comm.rank)
        self.notice()

    def update(self, *, lr: float, step: int) -> Reading:
        """Apply the summed gradient on every rank. The reading is ready when all of them are."""
        pairs = zip(self._threads, self._workers, strict=True)
        readings = [thread.submit(worker.update, lr=lr, step=step) for thread, worker in pairs]
        self.notice()
        return _TeamReading(self, readings)

    def evaluate(self, *batches: MicroBatch) -> float:
        """Sum of the losses of all batches, one for each rank or fewer: the last ranks then have none."""
        given = zip(self._threads, self._workers, batches, strict=False)
        return sum(self._results([thread.submit(worker.evaluate, batch) for thread, worker, batch in given]))

    def settle(self) -> None:
        """Wait until everything that was asked for is done on all ranks."""
        self._on_all(lambda worker: worker.settle())

    def allocate_snapshot(self, values: Iterable[Value]) -> HostCopy:
        """Of the first rank's."""
        return self._workers[0].allocate_snapshot(values)

    def snapshot(self) -> None:
        """Begin to copy the first rank's params and states, behind what was asked for before."""
        self._results([self._threads[0].submit(self._workers[0].snapshot)])

    def close(self) -> None:
        """End the threads and free what collectives hold on to. Returns within seconds, whatever they are in.

        Where a thread cannot end, the process must do so by `threads.leave_if_stuck`.
        """
        for comm in self._comms:
            comm.abort()
        for thread, worker in zip_longest(self._threads, self._workers):
            thread.close(last=worker.close if worker else None)
        join(self._threads, CLOSE_SECONDS)

    # ------------------------------------------------------------------------------------------------------- failures

    def notice(self) -> None:
        """Raise if a rank has failed or has lost its way to the others."""
        failed = [(t.failure, rank) for rank, t in enumerate(self._threads) if t.failure is not None]
        if failed:
            failure, rank = min(failed, key=lambda pair: pair[0].time)  # the others may have failed because of it
            self.fail(rank, failure.error)
        for rank, comm in enumerate(self._comms):
            try:
                comm.check()
            except Exception as error:
                self.fail(rank, error)

    def fail(self, rank: int, error: BaseException) -> NoReturn:
        """Free the ranks that wait for `rank`, and raise what happened to it."""
        for comm in self._comms:
            comm.abort()
        if isinstance(error, SurogateError):
            raise error
        comm = self._comms[rank]
        raise RunStopped(
            f"rank {comm.rank} of {comm.world_size} (GPU {comm.device}) failed: {type(error).__name__}: {error}. The "
            "other ranks were stopped, and nothing of the step that was under way is saved; checkpoints of before are "
            "complete."
        ) from error

    # -------------------------------------------------------------------------------------------------------- threads

    def _on_all(self, work: Callable[[Worker], Result]) -> list[Result]:
        return self._results([t.submit(work, w) for t, w in zip(self._threads, self._workers, strict=True)])

    def _results(self, futures: Iterable[Future[Result]]) -> list[Result]:
        waited = list(futures)
        while True:
            _, under_way = wait(waited, timeout=NOTICE_SECONDS, return_when=FIRST_EXCEPTION)
            self.notice()
            if not under_way:
                return [future.result() for future in waited]


class _TeamReading:
    """A step's reading on every rank, looked at and never waited for: a wait for one device would not see another."""

    def __init__(self, team: Team, readings: Sequence[Future[Reading]]) -> None:
        self._team = team
        self._readings = readings

    @property
    def ready(self) -> bool:
        self._team.notice()
        asked = [future.done() and self._is_ready(rank, future) for rank, future in enumerate(self._readings)]
        return all(asked)  # every rank is asked, since one that has failed is why another is not ready

    def _is_ready(self, rank: int, future: Future[Reading]) -> bool:
        try:
            return future.result().ready
        except Exception as error:  # what a kernel did wrong is told to whoever asks its device next
            self._team.fail(rank, error)

    @property
    def finished_at(self) -> float:
        """When the last rank had finished the step."""
        return max(future.result().finished_at for future in self._readings)

    def values(self) -> tuple[float, float]:
        while not self.ready:
            time.sleep(POLL_SECONDS)
        values = [future.result().values() for future in self._readings]
        if len(set(map(repr, values))) > 1:
            told = "; ".join(f"rank {rank}: loss {loss}, norm {norm}" for rank, (loss, norm) in enumerate(values))
            raise RunStopped(
                f"the ranks disagree on a step whose gradients they have summed ({told}): an op of the update gives "
                "other bits on other devices, and the weights drift apart. Please report it; gpus: 1 avoids it."
            )
        return values[0]
