"""The loss picture: training and validation loss by step, and the learning rate, from a `metrics.jsonl`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .api import EvalReport, RunInfo, StepReport
from .metrics import METRICS_FILE, read_metrics
from .summary import count_text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_FILE = "loss.png"
TRAIN, VALIDATION, LR, INK, QUIET = "#2a6fbb", "#d1495b", "#b8bec7", "#20242b", "#7a828e"


@dataclass
class Curve:
    """What a metrics file tells of a run. `train` holds (step, loss or None, lr), `evals` (step, loss)."""

    title: str = ""
    parameters: int = 0
    device: str = ""
    tokens: int = 0
    train: list[tuple[int, float | None, float]] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)


class PictureLogger:
    """Draws `output_dir/loss.png` when the run closes, unless it did no step.

    It reads `metrics.jsonl` instead of keeping the reports: so a resumed run's picture begins at step 1, a long run
    holds nothing in memory, and `draw_loss` makes the same picture of any run later. A picture that cannot be
    written costs a message on stderr, not the run.
    """

    def __init__(self, info: RunInfo) -> None:
        self._output_dir = info.output_dir
        self._stepped = False

    def step(self, report: StepReport) -> None:
        self._stepped = True

    def eval(self, report: EvalReport) -> None:
        return

    def close(self, status: str) -> None:
        if not self._stepped:
            return
        path = self._output_dir / PICTURE_FILE
        try:
            draw_loss(self._output_dir / METRICS_FILE, path)
        except (OSError, ImportError) as error:
            print(f"{path} was not drawn: {error}", file=sys.stderr)


def draw_loss(metrics: Path, png: Path) -> bool:
    """Draw the run that `metrics` records. Returns False, and draws nothing, when no step has a finite loss.

    `png` appears whole or not at all. Raises OSError when a file cannot be read or written.
    """
    curve = read_curve(metrics)
    if all(loss is None for _, loss, _ in curve.train):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # headless: neither pyplot nor a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    _draw(figure, curve)
    image = BytesIO()
    figure.savefig(image, format="png")
    unfinished = png.with_name(f".{png.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(image.getvalue())
        os.replace(unfinished, png)
    finally:
        unfinished.unlink(missing_ok=True)
    return True


def read_curve(metrics: Path) -> Curve:
    """The run as it counts: a resumed or restarted run repeats steps, and what came later replaces what was there."""
    curve = Curve()
    tokens: list[int] = []
    for record in read_metrics(metrics):
        kind, step = record.get("log"), record.get("step")
        if kind == "run":
            curve.title, curve.parameters = record.get("run_name") or "", record.get("parameters") or 0
            curve.device = record.get("device") or ""
        elif kind == "step" and isinstance(step, int):
            while curve.train and curve.train[-1][0] >= step:
                curve.train.pop()
                tokens.pop()
            _drop_evals(curve, step)
            curve.train.append((step, record.get("loss"), record.get("lr") or 0.0))
            tokens.append(record.get("tokens") or 0)
        elif kind == "eval" and isinstance(step, int):
            _drop_evals(curve, step)
            if record.get("loss") is not None:
                curve.evals.append((step, record["loss"]))
    curve.tokens = sum(tokens)
    return curve


def _drop_evals(curve: Curve, from_step: int) -> None:
    while curve.evals and curve.evals[-1][0] >= from_step:
        curve.evals.pop()


def smooth(losses: np.ndarray[Any, Any], half_window: int) -> np.ndarray[Any, Any]:
    """Centred mean over 2 * half_window + 1 points, over fewer but as many on each side near the ends.

    Symmetric, so it neither lags behind the curve, as a running average does, nor bends it at the ends.
    """
    import numpy as np

    at = np.arange(len(losses))
    half = np.minimum(np.minimum(at, at[::-1]), half_window)
    total = np.concatenate([[0.0], np.cumsum(losses)])
    return np.asarray((total[at + half + 1] - total[at - half]) / (2 * half + 1))


def _draw(figure: Figure, curve: Curve) -> None:
    import numpy as np

    axes = figure.add_subplot()
    _draw_lr(axes, curve)
    finite = [(step, loss) for step, loss, _ in curve.train if loss is not None]
    steps, losses = np.array([s for s, _ in finite]), np.array([loss for _, loss in finite])
    smoothed = smooth(losses, half_window=max(1, len(losses) // 60))
    crowded = len(losses) >= 30
    if crowded:
        axes.plot(steps, losses, color=TRAIN, alpha=0.28, linewidth=0.8)
    marker = "o" if len(losses) < 3 else None
    axes.plot(steps, smoothed if crowded else losses, color=TRAIN, linewidth=1.8, marker=marker, label="training")
    if curve.evals:
        best = min(loss for _, loss in curve.evals)
        axes.plot(
            *zip(*curve.evals, strict=True),
            color=VALIDATION,
            linewidth=1.2,
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.8,
            label=f"validation (best {best:.3f})",
        )
    _draw_skipped(axes, curve)
    _limit_loss(axes, losses, [loss for _, loss in curve.evals])
    _dress(axes, curve)


def _draw_lr(axes: Axes, curve: Curve) -> None:
    right = axes.twinx()
    right.plot([s for s, _, _ in curve.train], [lr for _, _, lr in curve.train], color=LR, linewidth=1.1)
    right.set_ylim(0, max(max(lr for _, _, lr in curve.train) * 1.08, 1e-12))
    right.set_ylabel("learning rate", color=QUIET, fontsize=9)
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    right.yaxis.get_offset_text().set(color=QUIET, fontsize=8)
    right.tick_params(axis="y", colors=QUIET, labelsize=8, length=0)
    for spine in right.spines.values():
        spine.set_visible(False)
    # The learning rate goes behind the losses, whose background must then be clear.
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)


def _draw_skipped(axes: Axes, curve: Curve) -> None:
    skipped = [step for step, loss, _ in curve.train if loss is None]
    if skipped:
        heights = [0.012] * len(skipped)
        axes.plot(
            skipped,
            heights,
            linestyle="",
            marker="|",
            color=INK,
            markersize=8,
            transform=axes.get_xaxis_transform(),
            label=f"not finite ({len(skipped)})",
        )


def _limit_loss(axes: Axes, losses: np.ndarray[Any, Any], evals: list[float]) -> None:
    """Show all of it, but let a few wild steps not flatten the rest: they leave the picture at its top."""
    import numpy as np

    low = min([float(losses.min()), *evals])
    high = max([float(losses.max()), *evals])
    usual = float(np.percentile(losses, 98))
    if high - low > 3 * (usual - low) > 0:
        high = max([low + 1.5 * (usual - low), *evals])
    margin = max(0.05 * (high - low), 1e-3 * abs(high), 1e-6)
    axes.set_ylim(low - margin, high + margin)


def _dress(axes: Axes, curve: Curve) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss (nats per token)", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.margins(x=0.015)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9ced6")
    axes.plot([], [], color=LR, linewidth=1.1, label="learning rate")
    axes.legend(frameon=False, loc="upper right", fontsize=9, labelcolor=INK)
    facts = [f"{count_text(curve.parameters)} parameters", f"{curve.train[-1][0]:,} steps"]
    facts += [f"{count_text(curve.tokens)} tokens", curve.device]
    figure_title = curve.title.replace("$", r"\$")  # a dollar sign is no formula here
    axes.set_title(figure_title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=24)
    axes.text(0, 1.025, ", ".join(filter(None, facts)), transform=axes.transAxes, fontsize=9, color=QUIET, va="bottom")
