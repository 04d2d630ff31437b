"""Evaluations: the mean loss over the validation batches, during a run and after its last step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from surogate_core.api import EvalReport
from surogate_core.assembly.assembly import metrics_of
from surogate_core.batch import MicroBatch

from .job import Job
from .sums import prepass, sum_losses


def evaluates_after(job: Job, step: int) -> bool:
    """Return whether an evaluation follows a step, other than the last one, which `evaluate_last` evaluates."""
    return job.evaluations.due(step) and step < job.total_steps


def evaluate_first(job: Job) -> None:
    """Evaluate before the first step, if the run does. What it finds is never the best."""
    if job.eval_on_start and not job.progress.launched:
        evaluate(job)


def evaluate_last(job: Job) -> bool:
    """Evaluate after the last step, unless that was done before the run was resumed. Return whether it is done.

    An interrupt that cuts it saves a checkpoint. A run that is resumed from it makes up for the evaluation.
    """
    done = _is_evaluated(job) or evaluate(job)
    if not done or job.logger_failed():
        job.save()
        job.wait_for_saves()
        job.raise_failures()
    return done


def make_up_for_evaluation(job: Job) -> None:
    """Evaluate now if the interrupted run should have after its last step: an interrupt saves without evaluating."""
    if job.progress.step and evaluates_after(job, job.progress.step) and not _is_evaluated(job):
        evaluate(job)


def _is_evaluated(job: Job) -> bool:
    return job.progress.step in {step for step, _, _ in job.progress.evaluations}


class Measured(NamedTuple):
    """The mean loss over the labels of the validation batches, and the figures of the other metrics.

    report  None without labels, and if it is cut
    cut     an interrupt ended the evaluation between two batches
    """

    report: EvalReport | None
    figures: Sequence[Any] = ()
    cut: bool = False


def measure(job: Job) -> Measured:
    """Measure the loss of the validation batches. Changes neither the weights nor the order of the training data."""
    began, cut = time.perf_counter(), False

    def goes_on(batches: Sequence[MicroBatch]) -> bool:
        nonlocal cut
        job.processes.at("an evaluation", 0)
        job.interrupt.agree()
        cut = bool(job.interrupt.requested)
        return not cut

    batches: Iterable[Sequence[MicroBatch]] = takewhile(goes_on, job.eval_batches())
    if job.means:
        before = takewhile(goes_on, job.eval_batches())
        means = prepass(job.means, before, job.worker, job.reported, job.processes)
        batches = ([batch.given(means) for batch in together] for together in batches)
    sums = sum_losses(job.worker, batches, job.processes, "the end of an evaluation")
    if cut or not sums.labels:
        return Measured(None, cut=cut)
    seconds = time.perf_counter() - began
    loss, *figures = (sums.mean(total, one.per) for one, total in zip(job.reported, sums.totals, strict=True))
    report = EvalReport(
        step=job.progress.step,
        loss=float(loss),
        valid_tokens=sums.labels,
        duration_ms=seconds * 1000,
        time=time.time(),
        in_nats=job.in_nats,
        groups=sums.groups,
    )
    return Measured(report, figures)


def evaluate(job: Job) -> bool:
    """Evaluate, report it, and take it into account. Return whether it is done.

    An interrupt ends it without a report: a resumed run makes up for it.
    """
    report, figures, cut = measure(job)
    if report is None:
        return not cut
    step = job.progress.step
    job.progress.evaluations.append((step, report.loss, report.valid_tokens))
    if job.best_rule is not None and job.progress.best is not None and step:
        job.progress.best = job.best_rule.after(job.progress.best, step, report.loss, job.reported, figures)
    best = job.progress.best.step if job.progress.best else 0
    told = replace(report, best_step=best or None)
    job.report(lambda: _with_metrics(job, told, figures))
    if job.best_rule is not None and job.best_rule.saves and step and step == best:
        job.save()
    return True


def _with_metrics(job: Job, report: EvalReport, figures: Sequence[Any]) -> EvalReport:
    report, rule = replace(report, metrics=metrics_of(job.reported, figures)), job.best_rule
    if rule is None or not rule.loads or report.best_step == report.step:  # those of the weights of the outputs
        job.latest.evaluated = report.metrics
    return report
