"""The loop: batches in, optimizer steps out. Everything that it needs is made by `trainer.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ..api import EvalReport, Logger, StepReport
from ..checkpoint.progress import Progress
from ..data.loader import Loader, MicroBatch, Prefetch, StepBatch
from ..errors import NonFiniteError, RunStopped
from .interrupt import Interrupt
from .schedule import Schedule

if TYPE_CHECKING:
    from ..checkpoint.writer import Saves
    from ..runtime.readings import Reading
    from ..runtime.team import Team
    from ..runtime.worker import Worker

EVAL_BATCHES = 100
"""A periodic evaluation looks at no more than this; the one at the end sees everything."""

SHORTEST_SECONDS = 1e-6
"""Of a step: keeps tokens per second finite where the clocks of host and device disagree."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the loop runs on. `eval_batches(limit)` starts over at every call. `watch(steps_done)` has the worker run
    op by op from now on, and raise NonFiniteError at the first that writes a number which is not finite."""

    worker: Worker | Team
    loader: Loader
    schedule: Schedule
    loggers: Sequence[Logger]
    total_steps: int
    eval_batches: Callable[[int | None], Iterable[MicroBatch]]
    eval_steps: int
    saves: Saves
    save_steps: int
    max_nonfinite_steps: int
    watch: Callable[[int], None]


def train(job: Job, interrupt: Interrupt, progress: Progress) -> Progress:
    """Train to the last step, or until an interrupt asks to end; the interrupted step is finished and saved.

    `progress` is where to begin: that of the checkpoint when the worker holds one; it is brought up to date.
    A step is reported once it is done, which on a GPU is while the next one runs; before an evaluation or a save the
    loop catches up. Raises RunStopped, after saving, when more than `max_nonfinite_steps` steps in a row had no finite
    gradient; it names the op that went wrong first when the last of them is taken once more. What a checked run's
    NonFiniteError leaves whole, the weights of the step before, is saved too. However it ends, but for a second
    interrupt, every save that was begun is whole then, or its error is raised.
    """
    try:
        _train(job, interrupt, progress)
    except Exception:
        job.saves.wait()
        raise
    job.saves.wait()
    return progress


def _train(job: Job, interrupt: Interrupt, progress: Progress) -> None:
    try:
        _take_steps(job, interrupt, progress)
    except NonFiniteError as error:
        if not error.weights_whole or not progress.step:
            raise
        progress.launched = progress.step  # the step that failed has changed nothing
        progress.lr = job.schedule.lr(progress.step)
        _save(job, progress)
        raise NonFiniteError(
            f"{error}\nThe weights after step {progress.step} are saved.", weights_whole=True
        ) from None


def _take_steps(job: Job, interrupt: Interrupt, progress: Progress) -> None:
    pending: Launched | None = None
    done = progress.step  # an interrupt saves before the evaluation that was due
    if done and _evaluates(job, done) and done not in [step for step, _, _ in progress.evaluations]:
        evaluate(job, progress, _limit(job, done))
    mark = time.perf_counter()
    with Prefetch(job.loader.step, done, job.total_steps) as batches:
        for batch in batches:
            job.saves.poll()
            launched = launch(job, batch, progress)
            if pending is not None:
                mark = finish(job, pending, progress, mark)
            pending = launched
            evaluates = _evaluates(job, launched.step)
            saves = interrupt.take_save_request() or bool(job.save_steps and launched.step % job.save_steps == 0)
            if not (launched.reading.ready or evaluates or saves or interrupt.requested):
                continue
            mark, pending = finish(job, pending, progress, mark), None
            if interrupt.requested:
                break
            if evaluates:
                evaluate(job, progress, _limit(job, launched.step))
            if saves:
                _save(job, progress)
            mark = time.perf_counter() if evaluates or saves else mark
        if interrupt.requested:  # also when it came during the last evaluation
            _save(job, progress)


def _evaluates(job: Job, step: int) -> bool:
    return step == job.total_steps or bool(job.eval_steps and step % job.eval_steps == 0)


def _limit(job: Job, step: int) -> int | None:
    return None if step == job.total_steps else EVAL_BATCHES


@dataclass(frozen=True)
class Launched:
    """An optimizer step that is under way. `step` counts from 1."""

    step: int
    batch: StepBatch
    lr: float
    reading: Reading


def launch(job: Job, batch: StepBatch, progress: Progress) -> Launched:
    """One optimizer step: every micro-batch forward and backward, then the update."""
    progress.launched += 1
    lr = progress.lr = job.schedule.lr(progress.launched)
    return Launched(progress.launched, batch, lr, _take(job.worker, batch, progress.launched, lr))


def _take(worker: Worker | Team, batch: StepBatch, step: int, lr: float) -> Reading:
    scale = 1 / batch.valid_tokens if batch.valid_tokens else 0.0
    width, count = worker.width, len(batch.micro)
    for at in range(0, count, width):
        first, last, index = at == 0, at + width == count, (step - 1) * count + at
        worker.micro_step(*batch.micro[at : at + width], first=first, last=last, loss_scale=scale, index=index)
    return worker.update(lr=lr, step=step)


def finish(job: Job, done: Launched, progress: Progress, mark: float) -> float:
    """Wait for a step, report it to all loggers, and return when it was done on the device.

    `mark`: when the step before was done, or when the loop went on after an evaluation or a save. A reading may be read
    long after its step was done, while the next step is queued: the time of reading says nothing about the step.
    """
    loss, norm = done.reading.values()
    finished = done.reading.finished_at
    seconds = max(finished - mark, SHORTEST_SECONDS)
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
    )
    _tell(job, progress, lambda logger: logger.step(report))
    if progress.nonfinite > job.max_nonfinite_steps:
        _save(job, progress)
        job.saves.wait()
        raise RunStopped(
            f"step {progress.step}: loss or gradient was not finite in {progress.nonfinite} steps in a row "
            f"(max_nonfinite_steps: {job.max_nonfinite_steps}). The weights of the last good step are saved. "
            f"Lower learning_rate, look at the data, or use a wider dtype.\n{_first_fault(job, done)}"
        )
    return finished


def _first_fault(job: Job, done: Launched) -> str:
    """What is found when a step that changed nothing is taken once more, op by op. Only for a run that ends then."""
    try:
        job.worker.settle()
        job.watch(done.step - 1)
        _take(job.worker, done.batch, done.step, done.lr).values()
    except NonFiniteError as error:
        return f"The same step once more, op by op: {error}"
    except Exception as error:  # the run stops for another reason, which this must not hide
        return f"The op that went wrong first was not found: the step failed when it was taken once more ({error})."
    return (
        "The op that went wrong first was not found: taken once more, op by op, the step was finite. The weights have "
        "changed since (on a GPU one more step was under way), or a kernel gives other bits each time."
    )


def evaluate(job: Job, progress: Progress, limit: int | None) -> None:
    """Mean loss over the labels of the validation rows; touches neither weights nor the order of training data."""
    began = time.perf_counter()
    total, labels = sum_losses(job.worker, iter(job.eval_batches(limit)))
    if not labels:
        return
    seconds = time.perf_counter() - began
    report = EvalReport(
        step=progress.step, loss=total / labels, valid_tokens=labels, duration_ms=seconds * 1000, time=time.time()
    )
    progress.evaluations.append((progress.step, report.loss, labels))
    _tell(job, progress, lambda logger: logger.eval(report))


def sum_losses(worker: Worker | Team, batches: Iterator[MicroBatch]) -> tuple[float, int]:
    """(sum over the labels of all batches in nats, labels)."""
    total, labels = 0.0, 0
    while together := tuple(islice(batches, worker.width)):
        total += worker.evaluate(*together)
        labels += sum(batch.n_valid for batch in together)
    return total, labels


def _tell(job: Job, progress: Progress, tell: Callable[[Logger], None]) -> None:
    """Report to every logger. One that cannot go on, since its disk is full, ends the run after saving it."""
    try:
        for logger in job.loggers:
            tell(logger)
    except RunStopped:
        _save(job, progress)
        raise


def _save(job: Job, progress: Progress) -> None:
    """Of the weights as they are: after the last launched step, which may not be reported yet when a run stops."""
    if progress.saved != progress.launched:
        job.saves.save(progress.launched, progress)
        progress.saved = progress.launched
