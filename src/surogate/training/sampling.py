"""When a run writes samples, and what it does then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

from surogate_core.api import SampleReport
from surogate_core.errors import RunStopped

from .job import Job


def samples_after(job: Job, step: int) -> bool:
    """Return whether samples follow a step; 0: whether they come before the first.

    They follow the last one, which may be the one after which the evaluations have ended the run.
    """
    if job.sample_steps is None:
        return False
    last = step == job.total_steps or job.stopped_early
    return last or not step or bool(job.sample_steps and step % job.sample_steps == 0)


def make_up_for_samples(job: Job) -> None:
    """Write the samples before the first step, or those after the last one that an interrupted run has not written."""
    if samples_after(job, job.progress.step) and job.progress.sampled != job.progress.step:
        sample(job)


def sample(job: Job) -> None:
    """Report the samples of the weights as they are. A signal ends it without a report: a resumed run makes up for it.

    All processes call this; the writer has the samples, and the others wait. If they fail, the run is saved and stops.
    """
    step = job.progress.step
    job.processes.at(f"the samples after step {step}", inf)
    job.worker.gather()
    found: Sequence[SampleReport] | None = None
    if job.samples is not None:
        job.worker.settle()
        try:
            found = job.samples.take(step)
        except RunStopped as error:
            job.stop_for(
                RunStopped(f"{str(error).rstrip('.')}. Mend that, or remove sample_prompts, and resume the run.")
            )
    job.processes.barrier(f"the end of the samples after step {step}", inf)
    for report in found or ():
        job.report(partial(_same, report))
    if found is not None:
        job.progress.sampled = step
    job.interrupt.agree()


def _same(report: SampleReport) -> SampleReport:
    return report
