"""The training loop: micro-batches in, optimizer steps out. `trainer.py` builds what it uses.

Read from the top: `train` runs the steps, `launch` enqueues one of them, `finish` reports it.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from surogate_core.api import EvalReport, Logger, Numerics, NumericsReport, Report, StepReport
from surogate_core.batch import MicroBatch, StepBatch
from surogate_core.errors import NonFiniteError, PluginError, RunStopped

from ..checkpoints.progress import Progress
from ..data.loader import Loader, Prefetch
from ..world.processes import FIRST_STEP_SECONDS, SAVE_SECONDS, Processes
from .interrupt import Interrupt
from .schedule import Schedule
from .sums import prepass, sum_losses, with_means

if TYPE_CHECKING:
    from surogate_core.assembly.assembly import Reported
    from surogate_core.runtime.readings import Reading
    from surogate_core.runtime.team import AnyWorker

    from ..checkpoints.writer import CheckpointWriter

SHORTEST_SECONDS = 1e-6
"""Shortest reported time of a step. Keeps tokens per second finite if the clocks of host and device disagree."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Arguments of the loop.

    eval_batches   return the validation batches of the ranks of this process, the same at every call
    save_seconds   that a save may take
    saves_jointly  whether no process can save without the others
    failures       errors of loggers and metrics after which all processes are asked to save and stop
    means          names of the figures whose means over a step its micro-steps read (`Prepass`)
    reported       the loss, and the figures that it reports besides; `in_nats`: see `EvalReport`
    numerics       what numerics reports hold; None: there are none
    numerics_steps report on numerics every N steps
    watch          steps_done -> None: from now on the worker runs op by op and raises NonFiniteError at the first op
                   that writes NaN or inf
    """

    worker: AnyWorker
    processes: Processes
    loader: Loader
    schedule: Schedule
    loggers: Sequence[Logger]
    total_steps: int
    eval_batches: Callable[[], Iterable[Sequence[MicroBatch]]]
    eval_steps: int
    checkpoints: CheckpointWriter
    save_steps: int
    save_seconds: float = SAVE_SECONDS
    saves_jointly: bool = False
    means: Sequence[str] = ()
    reported: Sequence[Reported] = ()
    in_nats: bool = True
    failures: list[RunStopped | PluginError] = field(default_factory=list)
    max_nonfinite_steps: int
    watch: Callable[[int], None]
    numerics: Numerics | None = None
    numerics_steps: int = 0


def train(job: Job, interrupt: Interrupt, progress: Progress) -> Progress:
    """Train from `progress` to the last step, or until an interrupt or a stop: then finish the step and save it.

    `progress` is updated in place and returned; at a resume it is the checkpoint's. Every checkpoint that was begun is
    complete on return, or its error is raised; only a second interrupt does not wait for it.

    Raises RunStopped if every step was skipped, and, after saving, when loss or gradient was not finite in more than
    `max_nonfinite_steps` steps in a row; the message names the first op that went wrong. NonFiniteError of a checked
    run is raised after saving too, unless an op has begun to change the weights.
    """
    try:
        with _saving_intact_weights(job, progress):
            _run_steps(job, interrupt, progress)
            job.worker.gather()
    except Exception:  # not KeyboardInterrupt or SystemExit: the second interrupt
        _wait_for_saves(job)
        raise
    _wait_for_saves(job)
    _raise_failures(job)
    if progress.step == progress.nonfinite > 0 and interrupt.requested is None:
        raise RunStopped(
            f"all {progress.step} steps were skipped: loss or gradient was never finite, so nothing was trained. Lower "
            "learning_rate, check the data, or use a wider dtype; --check-finite names the first op that goes wrong."
        )
    return progress


def _run_steps(job: Job, interrupt: Interrupt, progress: Progress) -> None:
    """Launch the steps. Finish each after the next one is launched, so that the GPU never waits for the host.

    A step is finished at once if it is done already, and before an evaluation, a save and the end.
    """
    _make_up_for_evaluation(job, interrupt, progress)
    unfinished: Launched | None = None
    since, began = time.perf_counter(), progress.step
    with Prefetch(job.loader.step, progress.step, job.total_steps) as batches:
        for batch in batches:
            first = progress.step == began
            job.processes.at(f"step {progress.launched + 1}", FIRST_STEP_SECONDS if first else 0)
            job.checkpoints.poll()
            launched = launch(job, batch, progress)
            if unfinished is not None:
                since = finish(job, unfinished, progress, since)
            unfinished = launched
            interrupt.agree()
            last, evaluates = launched.step == job.total_steps, _evaluates_after(job, launched.step)
            saves = interrupt.take_save_request() or bool(job.save_steps and launched.step % job.save_steps == 0)
            if not (launched.reading.ready or last or evaluates or saves or interrupt.ends_steps()):
                continue
            since, unfinished = finish(job, launched, progress, since), None
            if interrupt.ends_steps():
                break
            if evaluates:
                evaluate(job, interrupt, progress)
            if interrupt.ends_steps():  # in the evaluation, which the resumed run makes up for: no step in between
                break
            if saves:
                _save(job, progress)
            if evaluates or saves:
                since = time.perf_counter()
        if interrupt.ends_steps() or _logger_failed(job, interrupt):
            _save(job, progress)


# ------------------------------------------------------------------------------------------------------------ one step


class Table(Protocol):
    """The figures of a numerics report that the device may still be computing."""

    def values(self) -> list[list[float]] | None:
        """Wait for them. None if the step calibrated, which a report cannot describe."""


@dataclass(frozen=True)
class Launched:
    """An optimizer step that the device may still be running. `step` counts from 1."""

    step: int
    batch: StepBatch
    lr: float
    reading: Reading
    table: Table | None


def launch(job: Job, batch: StepBatch, progress: Progress) -> Launched:
    progress.launched += 1
    step = progress.launched
    lr = progress.lr = job.schedule.lr(step)
    reports = job.numerics is not None and step % job.numerics_steps == 0
    batch = with_means(job.means, batch, job.worker, job.reported, job.processes)
    reading = optimizer_step(job.worker, batch, step, lr, reporting=reports)
    return Launched(step, batch, lr, reading, job.worker.read_numerics() if reports else None)


def optimizer_step(worker: AnyWorker, batch: StepBatch, step: int, lr: float, *, reporting: bool = False) -> Reading:
    """Enqueue forward and backward pass of every micro-batch of this process, then the update. A team takes `width` at
    a time. Micro-batches are counted over all processes.

    `reporting`: the first micro-step also writes the numerics report.
    """
    units = {"loss_scale": batch.valid_tokens, "group_scale": batch.groups}
    scales = {name: 1 / count if count else 0.0 for name, count in units.items()}
    width, count = worker.width, len(batch.micro)
    for at in range(0, count, width):
        first, last = at == 0, at + width == count
        index = ((step - 1) * count + at) // width * worker.world_size
        micro = batch.micro[at : at + width]
        reports = reporting and first
        worker.micro_step(*micro, first=first, last=last, index=index, reporting=reports, **scales)
    return worker.update(lr=lr, step=step)


def finish(job: Job, done: Launched, progress: Progress, since: float) -> float:
    """Wait for a launched step, report it to all loggers and return when the device finished it.

    `since`: when the device finished the step before, or when the loop continued after an evaluation or a save. The
    time of a step ends when the device finished it, not at this call, which is often much later: after the launch of
    the next step.
    """
    job.processes.at(f"step {done.step}")
    loss, norm, *figures = done.reading.values()
    job.processes.check()  # a step that was cut by the end of another process has wrong values
    finished_at = done.reading.finished_at
    seconds = max(finished_at - since, SHORTEST_SECONDS)
    progress.step = done.step
    progress.nonfinite = 0 if math.isfinite(norm) and math.isfinite(loss) else progress.nonfinite + 1
    progress.loss = loss
    progress.tokens += done.batch.tokens
    progress.seconds += seconds
    report = StepReport(
        step=done.step,
        epoch=done.batch.epoch,
        loss=loss,
        norm=norm,
        lr=done.lr,
        tokens=done.batch.tokens,
        valid_tokens=done.batch.valid_tokens,
        tokens_per_second=done.batch.tokens / seconds,
        duration_ms=seconds * 1000,
        time=time.time(),
        skipped=not math.isfinite(norm),
        groups=done.batch.groups,
    )
    _report(job, progress, lambda: replace(report, metrics=_metrics(job, figures)))
    if done.table is not None:
        _report_numerics(job, progress, done.table)
    if progress.nonfinite > job.max_nonfinite_steps:
        _stop_diverged(job, done, progress)
    return finished_at


def _report_numerics(job: Job, progress: Progress, table: Table) -> None:
    values = table.values()
    if values is None or job.numerics is None:
        return
    tensors, columns = job.numerics.tensors, job.numerics.columns
    report = NumericsReport(step=progress.step, tensors=tensors, columns=columns, values=values, time=time.time())
    _report(job, progress, lambda: report)


def _metrics(job: Job, values: Sequence[Any]) -> dict[str, float]:
    return {figure.name: figure.of(value) for figure, value in zip(job.reported[1:], values, strict=True)}


def _report(job: Job, progress: Progress, made: Callable[[], Report]) -> None:
    """Report to every logger. If one raises RunStopped (a full disk), or a metric fails, save before the run ends."""
    if job.failures:
        return
    try:
        report = made()
        for logger in job.loggers:
            logger.report(report)
    except (RunStopped, PluginError) as error:
        if job.saves_jointly:
            job.failures.append(error)
            job.processes.ask(f"{int(signal.SIGTERM)}")
            return
        _save(job, progress)
        raise


def _logger_failed(job: Job, interrupt: Interrupt) -> bool:
    """Return whether processes that save jointly have to because a logger of one has failed after they last agreed."""
    if job.saves_jointly:
        interrupt.agree()
    return job.saves_jointly and bool(interrupt.requested)


def _raise_failures(job: Job) -> None:
    if job.failures:
        raise job.failures[0]


def _save(job: Job, progress: Progress) -> None:
    """Save the weights as they are: after the last launched step, which may not be finished when the run stops."""
    job.processes.check()
    if progress.saved != progress.launched:
        job.processes.at(f"saving step {progress.launched}", job.save_seconds, saving=True)
        job.worker.gather()
        job.checkpoints.save(progress.launched, progress)
        progress.saved = progress.launched
        job.processes.at(f"step {progress.launched}, which is saved", 0)


def _wait_for_saves(job: Job) -> None:
    job.processes.at("waiting for a save", job.save_seconds, saving=True)
    job.checkpoints.wait()
    job.processes.at("after the last save", 0)


# ---------------------------------------------------------------------------------------------------------- evaluation


def _evaluates_after(job: Job, step: int) -> bool:
    return bool(job.eval_steps) and step % job.eval_steps == 0 and step < job.total_steps


def _is_evaluated(progress: Progress) -> bool:
    return progress.step in {step for step, _, _ in progress.evaluations}


def evaluate_last(job: Job, interrupt: Interrupt, progress: Progress) -> bool:
    """Evaluate after the last step, unless that was done before the run was resumed. Return whether it is done.

    An interrupt that cuts it saves a checkpoint. A run that is resumed from it makes up for the evaluation.
    """
    done = _is_evaluated(progress) or evaluate(job, interrupt, progress)
    if not done or _logger_failed(job, interrupt):
        _save(job, progress)
        _wait_for_saves(job)
        _raise_failures(job)
    return done


def _make_up_for_evaluation(job: Job, interrupt: Interrupt, progress: Progress) -> None:
    """Evaluate now if the interrupted run should have after its last step: an interrupt saves without evaluating."""
    if progress.step and _evaluates_after(job, progress.step) and not _is_evaluated(progress):
        evaluate(job, interrupt, progress)


def evaluate(job: Job, interrupt: Interrupt, progress: Progress) -> bool:
    """Report the mean loss over the labels of the validation batches. Return whether it is done.

    Changes neither the weights nor the order of the training data. An interrupt ends it between two batches, without a
    report: a resumed run makes up for it.
    """
    began, cut = time.perf_counter(), False

    def goes_on(batches: Sequence[MicroBatch]) -> bool:
        nonlocal cut
        job.processes.at("an evaluation", 0)
        interrupt.agree()
        cut = bool(interrupt.requested)
        return not cut

    batches: Iterable[Sequence[MicroBatch]] = takewhile(goes_on, job.eval_batches())
    if job.means:
        before = takewhile(goes_on, job.eval_batches())
        means = prepass(job.means, before, job.worker, job.reported, job.processes)
        batches = ([batch.given(means) for batch in together] for together in batches)
    sums = sum_losses(job.worker, batches, job.processes, "the end of an evaluation")
    if cut or not sums.labels:
        return not cut
    seconds = time.perf_counter() - began
    loss, *figures = (sums.mean(total, one.per) for one, total in zip(job.reported, sums.totals, strict=True))
    report = EvalReport(
        step=progress.step,
        loss=float(loss),
        valid_tokens=sums.labels,
        duration_ms=seconds * 1000,
        time=time.time(),
        in_nats=job.in_nats,
        groups=sums.groups,
    )
    progress.evaluations.append((progress.step, report.loss, sums.labels))
    _report(job, progress, lambda: replace(report, metrics=_metrics(job, figures)))
    return True


# ----------------------------------------------------------------------------------------------------------- NaN, inf


@contextmanager
def _saving_intact_weights(job: Job, progress: Progress) -> Iterator[None]:
    """Save the weights of the step before when a checked run raises NonFiniteError and they are unchanged."""
    try:
        yield
    except NonFiniteError as error:
        if not error.weights_whole or not progress.step or job.saves_jointly:  # the others do not stop here
            raise
        progress.launched = progress.step  # the failed step has changed nothing
        progress.lr = job.schedule.lr(progress.step)
        _save(job, progress)
        raise NonFiniteError(
            f"{error}\nThe weights after step {progress.step} are saved.", weights_whole=True
        ) from None


def _stop_diverged(job: Job, done: Launched, progress: Progress) -> NoReturn:
    _save(job, progress)
    _wait_for_saves(job)
    job.processes.barrier("the save of the last good step")  # an error of another process would end the save
    raise RunStopped(
        f"step {progress.step}: loss or gradient was not finite in {progress.nonfinite} steps in a row "
        f"(max_nonfinite_steps: {job.max_nonfinite_steps}). The weights of the last good step are saved. "
        f"Lower learning_rate, check the data, or use a wider dtype.\n{_first_nonfinite_op(job, done)}"
    )


def _first_nonfinite_op(job: Job, done: Launched) -> str:
    """Repeat a skipped step op by op and return what went wrong first. The worker is of no use afterwards."""
    try:
        job.worker.settle()
        job.watch(done.step - 1)
        optimizer_step(job.worker, done.batch, done.step, done.lr).values()
    except NonFiniteError as error:
        return f"The step repeated op by op: {error}"
    except Exception as error:  # must not hide why the run stops
        return f"The op that went wrong first was not found: repeating the step failed ({error})."
    return (
        "The op that went wrong first was not found: repeated op by op, the step was finite. The weights have changed "
        "since (on a GPU one more step had been launched), or a kernel is not deterministic."
    )
