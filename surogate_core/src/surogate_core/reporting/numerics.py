"""A numerics report as text: for each tensor of a block, the largest figures over all blocks."""

from __future__ import annotations

from ..api import NumericsReport

_COLUMN_WIDTH = 12


def numerics_lines(report: NumericsReport) -> list[str]:
    """Return the table of a report. Every figure is followed by the block that it belongs to, in brackets.

    Names are those within a block.
    """
    groups = {name.partition("*.")[2] or name: figures for name, figures in report.largest().items()}
    width = max((len(name) for name in groups), default=0)
    names = "".join(f"{column.name:>{_COLUMN_WIDTH}}" for column in report.columns)
    lines = [f"numerics at step {report.step}: largest figure, and its block", f"{'':{width}}{names}"]
    for name, figures in groups.items():
        cells = (
            f"{_figure(value, column.unit)}{f' [{block}]' if block >= 0 else ''}"
            for (value, block), column in zip(figures, report.columns, strict=True)
        )
        lines.append(f"{name:{width}}" + "".join(f"{cell:>{_COLUMN_WIDTH}}" for cell in cells))
    return lines


def _figure(value: float, unit: str) -> str:
    if unit == "steps":
        return f"{value:.0f}"
    if unit == "magnitude":
        return f"{value:.2g}"
    percent = 100 * value
    return "0%" if value == 0 else f"{percent:.1f}%" if percent >= 9.95 else f"{percent:.1g}%"
