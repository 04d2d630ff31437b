"""The duties of a run between its steps, in their order: stop, evaluate, save.

`due` reads the step and what the processes have agreed on, so that all decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate_core.train import Duty, Progress

from .evaluation import evaluate, evaluates_after
from .job import Job

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker


def duties(job: Job) -> tuple[Duty, ...]:
    return Stop(job), Evaluate(job), Save(job)


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

        The steps end here if the run has waited long enough for a better evaluation.
        """
        if not self.job.interrupt.ends_steps():  # asked for by a report of this step
            evaluate(self.job)
        return self.job.ends_steps()


@dataclass(frozen=True)
class Save(Duty):
    job: Job

    def due(self, progress: Progress) -> bool:
        job, step = self.job, progress.launched
        return job.interrupt.take_save_request() or job.saves.due(step) or job.kept.due(step)

    def __call__(self, worker: AnyWorker, progress: Progress) -> bool:
        self.job.save()
        return False
