"""The longest row that fits a device, for each way to train: the table of `surogate plan --longest`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from surogate_core.machine.devices import GIB

from .. import run
from ..fitting.longest import Longest
from ..runs.inputs import scaling_line
from .render import output_width, paragraph


def print_longest(found: run.LongestRows, chosen: str) -> None:
    console = Console(width=output_width() or 80, highlight=False)
    device = found.plan.report.device
    with console.capture() as printed:
        console.print(f"longest rows on {device.title}, {device.memory_bytes / GIB:.2f} GiB ({chosen})", markup=False)
        console.print()
        console.print(_table(found.rows))
    print("\n".join(line.rstrip() for line in printed.get().splitlines()), end="\n\n")  # rich pads lines
    for line in _changes(found.rows):
        print(line)
    for line in _notes(found):
        print(f"\n{paragraph(line, output_width() or 80)}")


def _table(rows: list[Longest]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for head in ("tokens", "tokens/s", "GiB", "host GiB"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for row in rows:
        if row.proposal is None:
            table.add_row(row.way, "none", "", "", "", row.limited_by, style="yellow")
            continue
        report = row.proposal.plan.report
        table.add_row(
            row.way,
            f"{row.tokens:,}",
            f"{report.tokens_per_second:,.0f}",
            f"{report.device_bytes['total'] / GIB:.2f}",
            f"{report.pinned_bytes / GIB:.1f}" if report.pinned_bytes else "",
            row.limited_by,
        )
    return table


def _changes(rows: list[Longest]) -> Iterator[str]:
    """Yield the lines for the file: those of all ways first."""
    every = {row.way: row.proposal.lines for row in rows if row.proposal}
    common = [line for line in next(iter(every.values()), []) if all(line in lines for lines in every.values())]
    if common:
        yield from ["each:", *(f"  {line}" for line in common)]
    for row in rows:
        lines = [line for line in every.get(row.way, ()) if line not in common]
        if row.scaling and row.proposal:
            lines.append(scaling_line(row.scaling, of_base=bool(row.proposal.plan.inputs.adapters)))
        if lines:
            yield from [f"{row.way}:", *(f"  {line}" for line in lines)]


def _notes(found: run.LongestRows) -> Iterator[str]:
    planned = [row.proposal.plan.report for row in found.rows if row.proposal]
    if found.plan.report.host_memory is None and any(report.pinned_bytes for report in planned):
        yield "host GiB are not checked: host_memory_limit sets what the host has."
    if any(row.scaling for row in found.rows):
        yield f"The model has {found.opened.dims.max_positions:,} positions: rope_scaling extends it."
    if not planned:
        yield "Nothing fits: use a smaller model, or a GPU with more memory."


def to_json(row: Longest) -> dict[str, Any]:
    """Return a row of the table as data: an element of "longest" of `surogate plan --longest --json`."""
    report = row.proposal.plan.report if row.proposal else None
    return {
        "way": row.way,
        "tokens": row.tokens,
        "limited_by": row.limited_by,
        "rope_scaling": row.scaling,
        "changes": dict(row.proposal.changes) if row.proposal else None,
        "tokens_per_second": report.tokens_per_second if report else None,
        "device_bytes": report.device_bytes["total"] if report else None,
        "pinned_bytes": report.pinned_bytes if report else None,
    }
