"""The duties of a run between its steps, in their order: stop, evaluate, sample, what callbacks do, save.

`due` reads the step and what the processes have agreed on, so that all decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate_core.train import Duty, Progress

from .evaluation import evaluate, evaluates_after
from .job import Job
from .sampling import sample, samples_after

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker


def duties(job: Job, calls: Sequence[Duty] = ()) -> tuple[Duty, ...]:
    return Stop(job), Evaluate(job), Sample(job), *calls, Save(job)


@dataclass(frozen=True)
class Stop(Duty):
    """Ends the steps after a signal, or when a listener has asked for it."""

    job: Job

    def due(self, progress: Progress) -> bool:
        self.job.processes.at(f"step {progress.step + 1}")
        self.job.interrupt.agree()
        return self.job.interrupt.ends_steps()

    def __call__(self, worker: AnyWorker, progress: Progress) -> bool:
        return True


@dataclass(frozen=True)
class Evaluate(Duty):
    job: Job

    def due(self, progress: Progress) -> bool:
        return evaluates_after(self.job, progress.launched)

    def __call__(self, worker: AnyWorker, progress: Progress) -> bool:
        """Evaluate. A resumed run makes up for an evaluation that is cut, so no step may come in between.

        The steps end here if the run has waited long enough for a better evaluation. Then it writes its last samples.
        """
        if not self.job.interrupt.ends_steps():  # asked for by a report of this step
            evaluate(self.job)
        if self.job.stopped_early and samples_after(self.job, progress.step) and not self.job.interrupt.ends_steps():
            sample(self.job)
        return self.job.ends_steps()


@dataclass(frozen=True)
class Sample(Duty):
    job: Job

    def due(self, progress: Progress) -> bool:
        return samples_after(self.job, progress.launched)

    def __call__(self, worker: AnyWorker, progress: Progress) -> bool:
        """Write samples. A resumed run makes up for those that are cut, so no step may come in between."""
        if not self.job.interrupt.ends_steps():
            sample(self.job)
        return self.job.interrupt.ends_steps()


@dataclass(frozen=True)
class Save(Duty):
    job: Job

    def due(self, progress: Progress) -> bool:
        job, step = self.job, progress.launched
        return job.interrupt.take_save_request() or job.saves.due(step) or job.kept.due(step)

    def __call__(self, worker: AnyWorker, progress: Progress) -> bool:
        self.job.save()
        return False
