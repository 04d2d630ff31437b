"""The table that a finished run prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TextIO

from ..reporting.text import LINE_WIDTH, count_text, duration_text
from ..run import TrainResult


def print_summary(out: TextIO, result: TrainResult) -> None:
    """Print the results of a finished run as a table of 80 columns. Only longer paths and commands exceed them.

    What is None in the result is left out.
    """
    from rich.box import HORIZONTALS
    from rich.table import Table
    from rich.text import Text

    from ..reporting.live import TerminalConsole

    console = TerminalConsole(file=out, width=LINE_WIDTH, highlight=False)
    done = f"{result.run_name}: done, {result.steps:,} step{'s' * (result.steps != 1)}"
    console.print(Text(done, style="bold green"), soft_wrap=True)
    table = Table(box=HORIZONTALS, show_header=False, width=LINE_WIDTH, border_style="dim")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for label, text in _rows(result):
        table.add_row(label, Text(text, style="bold" if label == "validation loss" else ""))
    console.print(table)
    for program, line in result.commands:  # never wrapped, so that they can be copied
        console.print(Text(f"  {program}", style="dim"), Text(f"    {line}"), sep="\n", soft_wrap=True)


def to_json(result: TrainResult) -> dict[str, Any]:
    """Return the result as data: the contract of `surogate train --json`."""
    evaluations = [dict(zip(("step", "loss", "labels"), found, strict=True)) for found in result.evaluations]
    named = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "writer"}
    return {**named, "evaluations": evaluations, "commands": dict(result.commands)}


def _rows(result: TrainResult) -> Iterator[tuple[str, str]]:
    rate = f", {count_text(result.tokens / result.seconds)} tokens/s" if result.seconds > 0 else ""
    yield "trained", f"{count_text(result.tokens)} tokens in {duration_text(result.seconds)}{rate}"
    unit = " nats per token" if result.in_nats else ""
    if result.loss is not None:
        yield "training loss", f"{result.loss:.4f}{unit}, of the last step"
    if losses := [loss for _, loss, _ in result.evaluations]:
        best = f", best {min(losses):.4f}" if min(losses) != losses[-1] else ""
        yield "validation loss", f"{losses[-1]:.4f}{unit}{best}"
        if result.unigram_loss is not None:
            yield "unigram model", f"{result.unigram_loss:.4f}; {_compared(losses[-1], result.unigram_loss)}"
    if result.bits_per_byte is not None:
        yield "bits per byte", f"{result.bits_per_byte:.4f}"
    weights = "the model"
    if result.adapter_dir is not None:
        weights = f"the adapter in {result.adapter_dir.name}"
    if result.merged_dir is not None:
        weights += f", base and adapter in {result.merged_dir.name}"
    yield "output", f"{result.output_dir}"
    yield "", f"{weights}, metrics.jsonl, loss.png, run.yaml"


def _compared(validation_loss: float, unigram_loss: float) -> str:
    gap = unigram_loss - validation_loss
    if gap >= 0:
        return f"this model is {gap:.4f} below"
    return f"worse than guessing by word frequency, by {-gap:.4f}: too few steps, or a wrong template"
