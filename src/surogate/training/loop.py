"""The loop of a run: `surogate_core.train` with the batches, reports and duties of the program.

`trainer.py` builds what it uses. Read from the top: `train` runs the steps, `_batches` says what comes before each of
them, `_report` what comes after it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn

from surogate_core import train as core
from surogate_core.api import NumericsReport, StepReport
from surogate_core.assembly.assembly import metrics_of
from surogate_core.batch import StepBatch
from surogate_core.errors import NonFiniteError, RunStopped

from ..data.loader import Prefetch
from ..world.processes import FIRST_STEP_SECONDS
from .duties import duties
from .evaluation import evaluate_first, make_up_for_evaluation
from .job import Job
from .sampling import make_up_for_samples
from .sums import with_means


def train(job: Job, calls: Sequence[core.Duty] = ()) -> None:
    """Train from `job.progress` to the last step, or until an interrupt or a stop: then finish the step and save it.

    `calls`: of callbacks, between the other duties. Every checkpoint that was begun is complete on return, or its error
    is raised; only a second interrupt does not wait for it.

    Raises RunStopped if every step was skipped, and, after saving, when loss or gradient was not finite in more than
    `max_nonfinite_steps` steps in a row; the message names the first op that went wrong. NonFiniteError of a checked
    run is raised after saving too, unless an op has begun to change the weights.
    """
    interrupt, progress = job.interrupt, job.progress
    try:
        with _saving_intact_weights(job):
            evaluate_first(job)
            make_up_for_evaluation(job)
            make_up_for_samples(job)
            with closing(_batches(job)) as batches:
                core.train(job.worker, batches, job.lr, progress, partial(_report, job), duties(job, calls))
            if job.ends_steps() or job.logger_failed():
                job.save()
            job.worker.gather()
    except Exception:  # not KeyboardInterrupt or SystemExit: the second interrupt
        job.wait_for_saves()
        raise
    job.wait_for_saves()
    job.raise_failures()
    if progress.step == progress.nonfinite > 0 and interrupt.requested is None:
        raise RunStopped(
            f"all {progress.step} steps were skipped: loss or gradient was never finite, so nothing was trained. Lower "
            "learning_rate, check the data, or use a wider dtype; --check-finite names the first op that goes wrong."
        )


def _batches(job: Job) -> Generator[StepBatch]:
    """Yield the batches of the steps that are left, until the steps end. A thread prepares the next ones."""
    progress, began = job.progress, job.progress.step
    with Prefetch(job.loader.step, began, job.total_steps) as batches:
        for batch in batches:
            if job.ends_steps():  # asked for by the report of a step; or the run had ended when it was resumed
                return
            first = progress.step == began
            job.processes.at(f"step {progress.step + 1}", FIRST_STEP_SECONDS if first else 0)
            job.checkpoints.poll()
            batch = with_means(job.means, batch, job.worker, job.reported, job.processes)
            reports = job.numerics is not None and (progress.launched + 1) % job.numerics_steps == 0
            yield replace(batch, reports_numerics=reports)


def _report(job: Job, done: core.Finished) -> None:
    """Report a step to all loggers, and stop the run if too many steps in a row were not finite."""
    job.processes.check()  # a step that was cut by the end of another process has wrong values
    job.report(lambda: _with_metrics(job, done))
    if done.launched.table is not None:
        _report_numerics(job, done.launched.table)
    if job.progress.nonfinite > job.max_nonfinite_steps:
        _stop_diverged(job, done.launched)


def _with_metrics(job: Job, done: core.Finished) -> StepReport:
    job.doubts.see(done.figures)
    report, used, latest = done.report, job.utilization, job.latest
    latest.metrics = metrics_of(job.reported, done.figures)
    latest.groups += report.groups
    latest.seconds += report.duration_ms / 1000
    mfu = used.of(report.tokens_per_second) if used else None
    return replace(report, metrics=latest.metrics, mfu=mfu)


def _report_numerics(job: Job, table: core.Table) -> None:
    values = table.values()
    if values is None or job.numerics is None:
        return
    tensors, columns, step = job.numerics.tensors, job.numerics.columns, job.progress.step
    report = NumericsReport(step=step, tensors=tensors, columns=columns, values=values, time=time.time())
    job.report(lambda: report)


# ----------------------------------------------------------------------------------------------------------- NaN, inf


@contextmanager
def _saving_intact_weights(job: Job) -> Iterator[None]:
    """Save the weights of the step before when a checked run raises NonFiniteError and they are unchanged."""
    try:
        yield
    except NonFiniteError as error:
        progress = job.progress
        if not error.weights_whole or not progress.step or job.saves_jointly:  # the others do not stop here
            raise
        progress.launched = progress.step  # the failed step has changed nothing
        progress.lr = job.lr(progress.step)
        job.save()
        raise NonFiniteError(
            f"{error}\nThe weights after step {progress.step} are saved.", weights_whole=True
        ) from None


def _stop_diverged(job: Job, done: core.Launched) -> NoReturn:
    job.save()
    job.wait_for_saves()
    job.processes.barrier("the save of the last good step")  # an error of another process would end the save
    raise RunStopped(
        f"step {job.progress.step}: loss or gradient was not finite in {job.progress.nonfinite} steps in a row "
        f"(max_nonfinite_steps: {job.max_nonfinite_steps}). The weights of the last good step are saved. "
        f"Lower learning_rate, check the data, or use a wider dtype.\n{_first_nonfinite_op(job, done)}"
    )


def _first_nonfinite_op(job: Job, done: core.Launched) -> str:
    """Repeat a skipped step op by op and return what went wrong first. The worker is of no use afterwards."""
    try:
        job.worker.settle()
        job.watch(done.step - 1)
        batch = replace(done.batch, reports_numerics=False)
        core.optimizer_step(job.worker, batch, done.step, done.lr).values()
    except NonFiniteError as error:
        return f"The step repeated op by op: {error}"
    except Exception as error:  # must not hide why the run stops
        return f"The op that went wrong first was not found: repeating the step failed ({error})."
    return (
        "The op that went wrong first was not found: repeated op by op, the step was finite. The weights have changed "
        "since (on a GPU one more step had been launched), or a kernel is not deterministic."
    )
