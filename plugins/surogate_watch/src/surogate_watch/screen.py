"""Runs as a table of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .runs import Run

GIB = 1 << 30
SPARKS = "▁▂▃▄▅▆▇█"
WIDTH = 16
"""Columns of a sparkline."""

COLOURS = {
    **{"running": "green", "starting": "cyan", "finished": "bold green"},
    **{"stalled": "yellow", "stopped": "magenta", "killed": "red"},
}


def screen(runs: Sequence[Run]) -> RenderableType:
    """Return all runs as a table, with one line of totals below it."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for head in ("run", "state", "step", "", "loss", "", "eval", "tok/s", "plan", "GiB", "plan", "left", "last line"):
        right = head in ("step", "loss", "eval", "tok/s", "GiB", "plan", "left", "last line")
        table.add_column(head, justify="right" if right else "left", no_wrap=head != "run", overflow="fold")
    for run in runs:
        table.add_row(*_row(run))
    counts = {state: sum(run.state == state for run in runs) for state in COLOURS}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no runs"
    return Group(table, Text(told, style="dim"))


def _row(run: Run) -> list[RenderableType]:
    share = run.step / run.total_steps if run.total_steps else 0.0
    planned = run.planned.get("tokens_per_second")
    behind = bool(planned and run.tokens_per_second and run.tokens_per_second < 0.9 * planned)
    bytes_planned = run.planned.get("device_bytes")
    over = bool(bytes_planned and run.memory_bytes and run.memory_bytes > 1.05 * bytes_planned)
    return [
        Text(run.name, style="bold"),
        Text(run.state, style=COLOURS[run.state]),
        f"{run.step:,}/{run.total_steps:,}",
        ProgressBar(total=1.0, completed=share, width=10),
        f"{run.losses[-1][1]:.4f}" if run.losses else "",
        Text(sparkline([loss for _, loss in run.losses]), style="cyan"),
        "" if run.eval_loss is None else f"{run.eval_loss:.4f}",
        Text(_count(run.tokens_per_second), style="yellow" if behind else ""),
        Text(_count(planned), style="dim"),
        Text(_gib(run.memory_bytes), style="yellow" if over else ""),
        Text(_gib(bytes_planned), style="dim"),
        _duration(run.seconds_left),
        _duration(run.age) + (" ago" if run.age is not None else ""),
    ]


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Return values as bars, each the mean of an equal share of them, from the lowest to the highest mean."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * n // count for n in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def _count(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


def _gib(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.1f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02}h"
    return (
        f"{hours}h{minutes % 60:02}m"
        if hours
        else f"{minutes}m{int(seconds) % 60:02}s"
        if minutes
        else f"{int(seconds)}s"
    )
