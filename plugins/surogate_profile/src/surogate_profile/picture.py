"""The profile as a picture: two stacked bars by kind of op, what was measured above what the plan expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate.reporting.picture import INK, QUIET, drawn, leave_the_bottom

from .step_profile import StepProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = 9
"""Kinds of op with a colour of their own: those that take longest. The others share one."""

COLOURS = (
    *("#2a6fbb", "#d1495b", "#3d9a6d", "#e2a03f", "#7b5ea7", "#4fb3bf", "#a3704b", "#c86fa0", "#7f8f3a"),
    *("#9aa3af", "#dfe3e8"),
)
_LABELLED = 0.02
"""Share of the step from which on a part of a bar is labelled with its milliseconds."""


def draw(profile: StepProfile) -> bytes:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        _draw_bars(axes, parts(profile), profile.seconds)
        rate = f"{profile.tokens / profile.seconds:,.0f} tokens/s"
        title = f"{profile.model}, {profile.batches}\n{profile.device.title}, {rate}"
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
        figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8, labelcolor=INK)

    return drawn((11, 4.2), fill)


def parts(profile: StepProfile) -> list[tuple[str, float, float]]:
    """Return (name, measured seconds, planned seconds) of each part of a bar. They sum up to the step."""
    kinds = profile.by_kind()
    found = [(group.kind, group.seconds, group.planned_seconds) for group in kinds[:KINDS]]
    rest = kinds[KINDS:]
    if rest:
        seconds, planned = sum(g.seconds for g in rest), sum(g.planned_seconds for g in rest)
        found.append((f"{len(rest)} other kinds", seconds, planned))
    return [*found, ("between ops", max(profile.gaps, 0.0), 0.0)]


def _draw_bars(axes: Axes, found: list[tuple[str, float, float]], step: float) -> None:
    left = [0.0, 0.0]
    colours = [*COLOURS[: len(found) - 1], COLOURS[-1]]
    for (name, *seconds), colour in zip(found, colours, strict=True):
        widths = [1000 * part for part in seconds]
        axes.barh([1, 0], widths, left=left, color=colour, height=0.62, label=name, edgecolor="white", linewidth=0.6)
        for y, width, start in zip([1, 0], widths, left, strict=True):
            if width > _LABELLED * 1000 * step:
                axes.text(start + width / 2, y, f"{width:.3g}", ha="center", va="center", fontsize=8, color="white")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks([1, 0], [f"measured\n{left[0]:.4g} ms", f"plan\n{left[1]:.4g} ms"])
    axes.set_xlabel("milliseconds of a step", color=INK)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.grid(axis="x", color="#e8eaed", linewidth=0.8)
    axes.set_axisbelow(True)
    leave_the_bottom(axes, QUIET)
