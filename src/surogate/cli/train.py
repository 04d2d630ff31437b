"""`surogate train`, `pt` and `sft`: training, the table that a finished run prints, and restarts."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TextIO

from surogate_core.errors import RunLost, RunStopped
from surogate_core.machine.timing import mark
from surogate_core.plugins.discovery import load_registry

from .. import run
from ..config.schema import TrainConfig
from ..reporting.text import LINE_WIDTH, count_text, counted, duration_text, mfu_text
from ..run import TrainResult
from ..training.start import last_checkpoint
from .json_output import print_json
from .options import RunArguments
from .render import print_error


def train_command(arguments: RunArguments, fit: str | None = None, *, as_json: bool = False) -> int:
    """Train a run, with the fastest settings for the target `fit` if there is one (see `run.fit`).

    Return 130 or 143 if a signal ended it after a save, 3 if a push failed, else 0.
    """
    mark("command line")
    loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
    mark("config, plugins")
    if fit is not None:
        from .fit import fitted

        loaded = fitted(arguments, loaded, fit)
        mark("fit")
    try:
        result = run.train(loaded, _say)
    except RunLost as error:
        restart_if_wanted(loaded.config, error, _say)
        raise
    if not result.writer:
        return result.signal_exit
    if as_json:
        print_json(to_json(result))
    if result.signal_exit:
        saved = result.checkpoint_dir / f"step_{result.steps:08d}"
        _say(f"interrupted after step {result.steps:,} of {result.total_steps:,}; saved: {saved}")
    else:
        print_summary(sys.stdout, result)
        if result.pushed and result.pushed.url:
            _say(f"pushed to {result.pushed.url}")
        elif result.pushed:
            print_error(result.pushed.error)
            return RunStopped.exit_code
    return result.signal_exit


def _say(line: str) -> None:
    print(line, flush=True)


def restart_if_wanted(config: TrainConfig, error: RunLost, notice: Callable[[str], None]) -> None:
    """Replace this process by one that resumes the run from its last complete checkpoint.

    Return if that is not wanted, or there is no checkpoint. A new process, because the driver may refuse everything
    after the error of a device. Processes that another program has started are restarted by that.
    """
    launcher = load_registry(files=config.plugins).launcher(config.launcher)
    joined = launcher.start is None and launcher.matches(os.environ)
    checkpoint = "" if joined or not config.max_restarts else last_checkpoint(config)
    if not checkpoint:
        return
    print_error(str(error))
    left = config.max_restarts - 1
    notice(f"restarting from {checkpoint} (max_restarts: {left} left)")
    sys.stderr.flush()
    settings = ("--set", f"max_restarts={left}", "--set", "resume_from_checkpoint=true")
    os.execv(sys.executable, [sys.executable, "-P", "-m", "surogate_core", *sys.argv[1:], *settings])


def print_summary(out: TextIO, result: TrainResult) -> None:
    """Print the results of a finished run as a table of 80 columns. Only longer paths and commands exceed them.

    What is None in the result is left out.
    """
    from rich.box import HORIZONTALS
    from rich.table import Table
    from rich.text import Text

    from ..reporting.live import TerminalConsole

    console = TerminalConsole(file=out, width=LINE_WIDTH, highlight=False)
    done = f"{result.run_name}: done, {counted(result.steps, 'step')}"
    console.print(Text(done, style="bold green"), soft_wrap=True)
    table = Table(box=HORIZONTALS, show_header=False, width=LINE_WIDTH, border_style="dim")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for label, text in _rows(result):
        table.add_row(label, Text(text, style="bold" if label == "validation loss" else ""))
    console.print(table)
    page = ("report", f"surogate report {shlex.quote(str(result.output_dir))} --html report.html")
    for program, line in (*result.commands, page):  # never wrapped, so that they can be copied
        console.print(Text(f"  {program}", style="dim"), Text(f"    {line}"), sep="\n", soft_wrap=True)


def to_json(result: TrainResult) -> dict[str, Any]:
    """Return the result as data: the contract of `surogate train --json`."""
    evaluations = [dict(zip(("step", "loss", "labels"), found, strict=True)) for found in result.evaluations]
    named = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "writer"}
    return {**named, "evaluations": evaluations, "commands": dict(result.commands)}


def _rows(result: TrainResult) -> Iterator[tuple[str, str]]:
    rate = f", {count_text(result.tokens / result.seconds)} tokens/s" if result.seconds > 0 else ""
    yield "trained", f"{count_text(result.tokens)} tokens in {duration_text(result.seconds)}{rate}"
    further = [f"{result.groups_per_second:.3g} {result.group}/s"] if result.group and result.groups_per_second else []
    further += [mfu_text(result.mfu)] if result.mfu is not None else []
    if further:
        yield "", ", ".join(further)
    unit = " nats per token" if result.in_nats else ""
    if result.loss is not None:
        yield "training loss", f"{result.loss:.4f}{unit}, of the last step"
    if result.stop_reason:
        yield "ended by", f"{result.stop_reason}; {counted(result.total_steps, 'step')} were planned"
    if losses := {step: loss for step, loss, _ in result.evaluations}:
        shown = losses.get(result.weights_step, [*losses.values()][-1])
        best = f", best {min(losses.values()):.4f}" if min(losses.values()) != shown else ""
        yield "validation loss", f"{shown:.4f}{unit}{best}"
        if result.unigram_loss is not None:
            yield "unigram model", f"{result.unigram_loss:.4f}; {_compared(shown, result.unigram_loss)}"
    if result.best is not None:
        yield "best evaluation", f"{result.best.metric} {result.best.value:.4f}, after step {result.best.step:,}"
    for name in result.headlines:
        last, held = (found.get(name) for found in (result.step_metrics, result.evaluation_metrics))
        texts = [f"{last:.4g} in the last step"] if last is not None else []
        texts += [f"{held:.4g} in validation"] if held is not None else []
        if texts:
            yield name, ", ".join(texts)
    if result.bits_per_byte is not None:
        yield "bits per byte", f"{result.bits_per_byte:.4f}"
    weights = "the model"
    if result.adapter_dir is not None:
        weights = f"the adapter in {result.adapter_dir.name}"
    if result.merged_dir is not None:
        weights += f", base and adapter in {result.merged_dir.name}"
    if result.best is not None and result.weights_step != result.steps:
        weights += f" (weights after step {result.weights_step:,})"
    yield "output", f"{result.output_dir}"
    yield "", f"{weights}, metrics.jsonl, loss.png, run.yaml"


def _compared(validation_loss: float, unigram_loss: float) -> str:
    gap = unigram_loss - validation_loss
    if gap >= 0:
        return f"this model is {gap:.4f} below"
    return f"worse than guessing by word frequency, by {-gap:.4f}: too few steps, or a wrong template"
