"""The table that a finished run prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from .text import LINE_WIDTH, count_text, duration_text


def print_summary(
    out: TextIO,
    *,
    steps: int,
    tokens: int,
    seconds: float,
    output_dir: Path | str,
    run_name: str = "",
    training_loss: float | None = None,
    validation_loss: float | None = None,
    best_validation_loss: float | None = None,
    unigram_loss: float | None = None,
    bits_per_byte: float | None = None,
    weights: str = "the model",
    outputs: Sequence[str] = ("metrics.jsonl", "loss.png", "run.yaml"),
    commands: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the results of a finished run as a table of 80 columns. Only longer paths and commands exceed them.

    Losses are in nats per token. A row whose value is None is left out.

    tokens        trained on, in `seconds`
    unigram_loss  loss of a model that knows only how often each token occurs
    output_dir    folder with the trained `weights` and the files `outputs`
    commands      (program, the line that loads the result in it)
    """
    from rich.box import HORIZONTALS
    from rich.table import Table
    from rich.text import Text

    from .live import TerminalConsole

    rate = f", {count_text(tokens / seconds)} tokens/s" if seconds > 0 else ""
    rows = [("trained", f"{count_text(tokens)} tokens in {duration_text(seconds)}{rate}")]
    if training_loss is not None:
        rows.append(("training loss", f"{training_loss:.4f} nats per token, of the last step"))
    if validation_loss is not None:
        best = best_validation_loss if best_validation_loss != validation_loss else None
        rows.append(
            ("validation loss", f"{validation_loss:.4f} nats per token" + (f", best {best:.4f}" if best else ""))
        )
    if unigram_loss is not None:
        rows.append(("unigram model", f"{unigram_loss:.4f}" + _compared(validation_loss, unigram_loss)))
    if bits_per_byte is not None:
        rows.append(("bits per byte", f"{bits_per_byte:.4f}"))
    rows += [("output", f"{output_dir}"), ("", f"{weights}, {', '.join(outputs)}")]

    console = TerminalConsole(file=out, width=LINE_WIDTH, highlight=False)
    done = f"done, {steps:,} step{'s' * (steps != 1)}"
    console.print(Text(f"{run_name}: {done}" if run_name else done, style="bold green"), soft_wrap=True)
    table = Table(box=HORIZONTALS, show_header=False, width=LINE_WIDTH, border_style="dim")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text, style="bold" if label == "validation loss" else ""))
    console.print(table)
    for program, line in commands:  # never wrapped, so that they can be copied
        console.print(Text(f"  {program}", style="dim"), Text(f"    {line}"), sep="\n", soft_wrap=True)


def _compared(validation_loss: float | None, unigram_loss: float) -> str:
    if validation_loss is None:
        return ""
    gap = unigram_loss - validation_loss
    if gap >= 0:
        return f"; this model is {gap:.4f} below"
    return f"; worse than guessing by word frequency, by {-gap:.4f}: too few steps, or a wrong template"
