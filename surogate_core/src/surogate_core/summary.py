"""What a person reads of a run: figures in few characters, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from .memory.report import Report

LINE_WIDTH = 80


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
    """The end of a finished run as a table of 80 columns; only a path or a command longer than that sticks out.

    tokens: trained on, in `seconds`. Losses in nats a token; unigram_loss is that of a model that knows only how
    often each token occurs. output_dir: where the trained `weights` are, and beside them `outputs`. commands: (program,
    the line that loads the result there). A row whose value is None is left out.
    """
    from rich.box import HORIZONTALS
    from rich.table import Table
    from rich.text import Text

    from .live import TerminalConsole

    rate = f", {count_text(tokens / seconds)} tokens/s" if seconds > 0 else ""
    rows = [("trained", f"{count_text(tokens)} tokens in {duration_text(seconds)}{rate}")]
    if training_loss is not None:
        rows.append(("training loss", f"{training_loss:.4f} nats per token"))
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
    for program, line in commands:  # whole, beyond the margin if need be: they are there to be copied
        console.print(Text(f"  {program}", style="dim"), Text(f"    {line}"), sep="\n", soft_wrap=True)


def _compared(validation_loss: float | None, unigram_loss: float) -> str:
    if validation_loss is None:
        return ""
    gap = unigram_loss - validation_loss
    return f"; this model is {abs(gap):.4f} {'below' if gap >= 0 else 'ABOVE'}"


def count_text(count: float) -> str:
    """At most 5 characters, 3 digits: 512, 1.25k, 12.5k, 125k, 19.7M, 1.10B."""
    for limit, suffix in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "B")):
        scaled = count / limit * 1e3
        if scaled < 999.5:
            if suffix == "":
                return f"{scaled:.0f}"
            decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{decimals}f}{suffix}"
    return f"{count / 1e12:.3g}T"


def parameters_text(count: int) -> str:
    """8.19B, 596.0M, 9.2K, 512: parameters as models are named after them."""
    if count < 1000:
        return str(count)
    for unit, suffix in ((1e3, "K"), (1e6, "M")):
        if round(count / unit, 1) < 1000:
            return f"{count / unit:.1f}{suffix}"
    return f"{count / 1e9:.2f}B"


def duration_text(seconds: float) -> str:
    """4.2 s, 2 min 15 s, 3 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def devices_text(report: Report) -> str:
    """The device of a run, and how many there are of several."""
    return f"{report.world_size} x {report.device.title}" if report.world_size > 1 else report.device.title
