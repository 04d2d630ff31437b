"""The arguments of the loop of a run, with what all of its parts do: save, and report to loggers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surogate_core.api import Logger, Numerics, Report
from surogate_core.batch import MicroBatch
from surogate_core.errors import PluginError, RunStopped

from ..checkpoints.progress import Progress
from ..data.loader import Loader
from ..world.processes import SAVE_SECONDS, Processes
from .best_rule import BestRule
from .cadence import Cadence
from .doubts import Doubts
from .interrupt import Interrupt
from .schedule import Schedule

if TYPE_CHECKING:
    from surogate_core.assembly.assembly import Reported
    from surogate_core.runtime.team import AnyWorker

    from ..checkpoints.writer import CheckpointWriter
    from ..reporting.utilization import Utilization
    from .samples import Samples


@dataclass
class Latest:
    """Of this process's steps: their groups and seconds, and the metrics of the last step and the last evaluation."""

    groups: int = 0
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluated: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Arguments of the loop.

    progress       updated in place; at a resume it is the checkpoint's
    eval_batches   return the validation batches of the ranks of this process, the same at every call
    evaluations    between steps, `saves` of checkpoints, and `kept` ones, which are never deleted
    best_rule      which evaluation is the best, and when the run stops; None: it looks for none
    save_seconds   that a save may take
    saves_jointly  whether no process can save without the others
    failures       errors of loggers and metrics after which all processes are asked to save and stop
    means          names of the figures whose means over a step its micro-steps read (`Prepass`)
    reported       the loss, and the figures that it reports besides; `in_nats`: see `EvalReport`
    doubts         sees these figures of each step
    sample_steps   write samples every N steps, 0: before the first and after the last one; None: the run has none
    samples        of the writer
    numerics       what numerics reports hold; None: there are none
    numerics_steps report on numerics every N steps
    utilization    how MFU is computed; None: it is not known
    latest         what the last reports have said
    watch          steps_done -> None: from now on the worker runs op by op and raises NonFiniteError at the first op
                   that writes NaN or inf
    """

    worker: AnyWorker
    processes: Processes
    interrupt: Interrupt
    progress: Progress
    loader: Loader
    schedule: Schedule
    loggers: Sequence[Logger]
    doubts: Doubts
    total_steps: int
    eval_batches: Callable[[], Iterable[Sequence[MicroBatch]]]
    evaluations: Cadence
    checkpoints: CheckpointWriter
    saves: Cadence
    kept: Cadence
    eval_on_start: bool = False
    best_rule: BestRule | None = None
    save_seconds: float = SAVE_SECONDS
    saves_jointly: bool = False
    means: Sequence[str] = ()
    reported: Sequence[Reported] = ()
    in_nats: bool = True
    failures: list[RunStopped | PluginError] = field(default_factory=list)
    max_nonfinite_steps: int
    watch: Callable[[int], None]
    sample_steps: int | None = None
    samples: Samples | None = None
    numerics: Numerics | None = None
    numerics_steps: int = 0
    utilization: Utilization | None = None
    latest: Latest = field(default_factory=Latest)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step. All evaluations before it are done; that before step 1 does not count."""
        return self.schedule.lr(step, [loss for at, loss, _ in self.progress.evaluations if 0 < at < step])

    def save(self) -> None:
        """Save the weights as they are: after the last launched step, which may not be finished when the run stops."""
        self.processes.check()
        step = self.progress.launched
        if self.progress.saved != step:
            self.processes.at(f"saving step {step}", self.save_seconds, saving=True)
            self.worker.gather()
            self.checkpoints.save(step, self.progress)
            self.progress.saved = step
            self.processes.at(f"step {step}, which is saved", 0)

    @property
    def stopped_early(self) -> bool:
        """Whether the run has waited long enough for a better evaluation. A resumed run may begin so."""
        return self.best_rule is not None and self.best_rule.ends(self.progress.best)

    def ends_steps(self) -> bool:
        """Return whether no step follows: a signal, a listener or the evaluations say so. All processes agree."""
        return self.interrupt.ends_steps() or self.stopped_early

    def wait_for_saves(self) -> None:
        self.processes.at("waiting for a save", self.save_seconds, saving=True)
        self.checkpoints.wait()
        self.processes.at("after the last save", 0)

    def report(self, made: Callable[[], Report]) -> None:
        """Report to every logger. If one raises RunStopped (a full disk), or a metric fails, save before the run ends.

        If no process can save without the others, all are asked to.
        """
        if self.failures:
            return
        try:
            report = made()
            for logger in self.loggers:
                logger.report(report)
        except (RunStopped, PluginError) as error:
            self.stop_for(error)

    def stop_for(self, error: RunStopped | PluginError) -> None:
        """Save, and raise an error. If no process can save without the others, all are asked to, and it is raised
        then."""
        if self.saves_jointly:
            self.failures.append(error)
            self.processes.ask(f"{int(signal.SIGTERM)}")
            return
        self.save()
        raise error

    def logger_failed(self) -> bool:
        """Return whether processes that save jointly have to, as a logger of one has failed after they last agreed."""
        if self.saves_jointly:
            self.interrupt.agree()
        return self.saves_jointly and bool(self.interrupt.requested)

    def raise_failures(self) -> None:
        if self.failures:
            raise self.failures[0]
