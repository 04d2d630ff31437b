"""The end of a run: the outputs and the evaluation after the last step, why it came, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from surogate_core.api import OutputReport
from surogate_core.planning.plan import Plan

from ..checkpoints.adapter import ADAPTER_FOLDER, MERGED_FOLDER
from ..data.checks import bits_per_byte
from ..outputs.load_commands import load_commands
from ..reporting.text import group_text
from ..runs.run import Run
from .evaluation import evaluate_last
from .job import Job
from .result import BestEvaluation, TrainResult
from .run_files import NoFiles
from .steps import Steps


def write_outputs(job: Job, files: NoFiles, notice: Callable[[str], None]) -> bool:
    """Write the outputs, and evaluate after the last step. Return whether that is done.

    The outputs come first, as the evaluation may take long, unless it decides which weights they have. Then the last
    weights are saved as a checkpoint, where they are not lost.
    """
    rule, progress = job.best_rule, job.progress
    if rule is not None and rule.loads:
        if not evaluate_last(job):
            return False
        job.save()
        job.wait_for_saves()
        job.worker.gather()
        rule.refuse_none(progress.best)
        notice(f"outputs: the weights after step {progress.weights_step(True):,}, the best by {progress.best}")
        files.write_outputs(job.worker, progress, job.save_seconds)
        return True
    files.write_outputs(job.worker, progress, job.save_seconds)
    return evaluate_last(job)


def why_ended(job: Job) -> str:
    """Return why the run ends before its last step by itself or by a callback; "" if it does not."""
    if job.interrupt.why and job.progress.step < job.total_steps:
        return job.interrupt.why
    rule, best = job.best_rule, job.progress.best
    if rule is None or best is None or not rule.ends(best) or job.progress.step >= job.total_steps:
        return ""
    return rule.why(best)


def output_report(job: Job, stop_reason: str) -> OutputReport:
    rule, progress = job.best_rule, job.progress
    best = progress.best if progress.best is not None and progress.best.step > 0 else None
    return OutputReport(
        step=progress.step,
        weights_step=progress.weights_step(rule is not None and rule.loads),
        metric=rule.metric if rule is not None else "loss",
        best_step=best.step if best else None,
        best_value=best.value if best else None,
        stop_reason=stop_reason,
        time=time.time(),
    )


def result_of(run: Run, plan: Plan, steps: Steps, job: Job, signal_exit: int, writer: bool) -> TrainResult:
    config, data, progress, latest = run.config, steps.data, job.progress, job.latest
    in_nats, used = plan.inputs.loss.in_nats, job.utilization
    output, is_adapter = Path(config.output_dir), config.adapter is not None
    bits = None
    weights_step, found = progress.weights_step(bool(config.load_best_model_at_end)), progress.best
    evaluated = [found for found in progress.evaluations if found[0] == weights_step]
    if in_nats and evaluated and data.validation_bytes:
        _, loss, labels = evaluated[-1]
        bits = bits_per_byte(loss, labels, data.validation_bytes) if labels == data.validation_labels else None
    return TrainResult(
        run_name=config.resolved_run_name,
        output_dir=output,
        checkpoint_dir=Path(config.resolved_checkpoint_dir),
        steps=progress.step,
        total_steps=steps.total,
        tokens=progress.tokens,
        seconds=progress.seconds,
        loss=progress.loss,
        evaluations=tuple(progress.evaluations),
        in_nats=in_nats,
        unigram_loss=data.unigram_loss if in_nats else None,
        bits_per_byte=bits,
        signal_exit=signal_exit,
        writer=writer,
        weights_step=weights_step,
        best=BestEvaluation(found.step, found.metric, found.value) if found and found.step else None,
        adapter_dir=output / ADAPTER_FOLDER if is_adapter and not signal_exit else None,
        merged_dir=output / MERGED_FOLDER if is_adapter and config.merge_adapter and not signal_exit else None,
        commands=() if signal_exit else load_commands(run),
        mfu=used.of(progress.tokens / progress.seconds) if used and progress.seconds > 0 else None,
        group=group_text(plan.inputs.loss.group_size),
        groups_per_second=latest.groups / latest.seconds if latest.seconds > 0 else 0.0,
        headlines=tuple(figure.name for figure in plan.assembly.reported if figure.headline),
        step_metrics=latest.metrics,
        evaluation_metrics=latest.evaluated,
    )
