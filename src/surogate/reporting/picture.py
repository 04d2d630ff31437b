"""The loss picture: training and validation loss by step, the learning rate, and below them what the loss reports
first (`Metric.headline`), from a `metrics.jsonl`.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from surogate_core.api import Logger, Report, RunInfo, StepReport

from ..machine.replaced_file import replaced
from .metrics import metrics_path, read_metrics
from .text import count_text, counted, lr_text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

PICTURE_FILE = "loss.png"
TRAIN, VALIDATION, LR, INK, QUIET = "#2a6fbb", "#d1495b", "#c9ced6", "#20242b", "#7a828e"


class TrainPoint(NamedTuple):
    step: int
    loss: float | None
    lr: float
    tokens: int
    skipped: bool
    metrics: Mapping[str, float | None] = {}


class EvalPoint(NamedTuple):
    step: int
    loss: float
    metrics: Mapping[str, float | None] = {}


@dataclass
class Curve:
    """The data of the picture, from a metrics file. A loss that was not finite is None.

    best  the step of the best evaluation, if the run looks for one
    """

    title: str = ""
    parameters: int = 0
    device: str = ""
    train: list[TrainPoint] = field(default_factory=list)
    evals: list[EvalPoint] = field(default_factory=list)
    best: int | None = None
    headlines: tuple[str, ...] = ()

    @property
    def best_eval(self) -> EvalPoint:
        """The best evaluation of some: by the rule of the run, or by the loss if it has none."""
        return min(self.evals, key=lambda point: (point.step != self.best, point.loss))


class PictureLogger(Logger):
    """Draws `output_dir/loss.png` when the run ends, unless it did no step.

    It reads `metrics.jsonl` instead of keeping the reports. So the picture of a resumed run starts at step 1, a long
    run keeps nothing in memory, and `draw_loss` can draw the same picture of any run later. If the picture cannot be
    written, a message goes to stderr and the run still succeeds.
    """

    def __init__(self, info: RunInfo) -> None:
        self._output_dir = info.output_dir
        self._metrics = metrics_path(info.output_dir, info.config.get("log_file"))
        self._stepped = False

    def report(self, report: Report) -> None:
        self._stepped = self._stepped or isinstance(report, StepReport)

    def close(self, status: str) -> None:
        if not self._stepped:
            return
        path = self._output_dir / PICTURE_FILE
        try:
            draw_loss(self._metrics, path)
        except Exception as error:  # no fault of a picture may fail a finished run
            print(f"{path} was not drawn: {error}", file=sys.stderr)


def import_ahead() -> None:
    """Import the modules for drawing on a thread, while the caller waits for something else."""

    def load() -> None:
        with suppress(ImportError):
            import matplotlib.backends.backend_agg
            import matplotlib.figure  # noqa: F401

    threading.Thread(target=load, name="picture", daemon=True).start()


def draw_loss(metrics: Path, png: Path) -> bool:
    """Draw the run that `metrics` records. Returns False, and draws nothing, when no step has a finite loss.

    `png` appears whole or not at all. Raises OSError when a file cannot be read or written.
    """
    curve = read_curve(metrics)
    if all(point.loss is None for point in curve.train):
        return False
    image = drawn((9, 8 if _shown(curve) else 5), lambda figure: _draw(figure, curve))
    with replaced(png) as fresh:
        fresh.write_bytes(image)
    return True


def drawn(size: tuple[float, float], draw: Callable[[Figure], None]) -> bytes:
    """Return a picture of `size`, in inches, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # headless: neither pyplot nor a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    draw(figure)
    image = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box in a title is enough
        canvas.print_png(image)  # `savefig` draws twice, for formats whose renderer is made later
    return image.getvalue()


def leave_the_bottom(axes: Axes, colour: str) -> None:
    """Hide all sides of the axes but the lower one."""
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colour)


def read_curve(metrics: Path) -> Curve:
    """Read a metrics file. If a resumed or restarted run repeats steps, the later records replace the earlier ones."""
    curve = Curve()
    for record in read_metrics(metrics):
        kind, step = record.get("log"), record.get("step")
        if kind == "run":
            curve.title, curve.parameters = record.get("run_name") or "", record.get("parameters") or 0
            curve.device, curve.headlines = record.get("device") or "", tuple(record.get("headlines") or ())
        elif kind == "step" and isinstance(step, int):
            while curve.train and curve.train[-1].step >= step:
                curve.train.pop()
            _drop_evals(curve, step)
            lr, tokens = record.get("lr") or 0.0, record.get("tokens") or 0
            point = TrainPoint(step, record.get("loss"), lr, tokens, record.get("skipped", False), _metrics(record))
            curve.train.append(point)
        elif kind == "eval" and isinstance(step, int):
            _drop_evals(curve, step)
            curve.best = record.get("best_step")
            if record.get("loss") is not None:
                curve.evals.append(EvalPoint(step, record["loss"], _metrics(record)))
    return curve


def _metrics(record: Mapping[str, Any]) -> Mapping[str, float | None]:
    found = record.get("metrics")
    return found if isinstance(found, dict) else {}


def _drop_evals(curve: Curve, from_step: int) -> None:
    while curve.evals and curve.evals[-1].step >= from_step:
        curve.evals.pop()


def smooth(values: Array, half_window: int) -> Array:
    """Return a running median, then a short running mean, over centred windows that shrink towards the ends.

    A centred window does not lag, unlike an average of past steps. A median ignores outliers and follows the curve
    where it is steep, where a mean would not.
    """
    import numpy as np

    for half, middle in ((half_window, np.median), (half_window // 3, np.mean)):
        reach = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
        values = np.array([middle(values[i - r : i + r + 1]) for i, r in enumerate(reach)])
    return values


def thin_out(steps: Array, losses: Array, points: int = 1500) -> tuple[Array, Array]:
    """Return at most `points` points: the median of each of `points` equal ranges. More would not be visible."""
    import numpy as np

    if len(steps) <= points:
        return steps, losses
    ranges = np.array_split(np.arange(len(steps)), points)
    return np.array([steps[s].mean() for s in ranges]), np.array([np.median(losses[s]) for s in ranges])


def _draw(figure: Figure, curve: Curve) -> None:
    import numpy as np

    shown = _shown(curve)
    grid = figure.add_gridspec(2 if shown else 1, max(1, len(shown)), height_ratios=[2.2, 1] if shown else None)
    axes = figure.add_subplot(grid[0, :])
    for column, name in enumerate(shown):
        _draw_metric(figure.add_subplot(grid[1, column]), curve, name)
    _draw_lr(axes, curve)
    finite = [(point.step, point.loss) for point in curve.train if point.loss is not None]
    steps, losses = np.array([step for step, _ in finite]), np.array([loss for _, loss in finite])
    if len(losses) >= 30:
        axes.plot(steps, losses, color=TRAIN, alpha=0.28, linewidth=0.7)
        steps, smoothed = thin_out(steps, losses)
        axes.plot(steps, smooth(smoothed, len(smoothed) // 50), color=TRAIN, linewidth=1.8, label="training")
    else:
        axes.plot(steps, losses, color=TRAIN, linewidth=1.8, marker="o", markersize=3, label="training")
    if curve.evals:
        axes.plot(
            [point.step for point in curve.evals],
            [point.loss for point in curve.evals],
            color=VALIDATION,
            linewidth=1.2,
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.8,
            label="validation",
        )
        _draw_best(axes, curve.best_eval)
    _draw_skipped(axes, curve)
    axes.plot([], [], color=LR, linewidth=1.0, label="learning rate (right)")  # last in the legend
    _limit_loss(axes, losses, [point.loss for point in curve.evals])
    _dress(axes, curve)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9, labelcolor=INK)


def _draw_best(axes: Axes, best: EvalPoint) -> None:
    axes.plot(
        [best.step],
        [best.loss],
        color=VALIDATION,
        linestyle="",
        marker="o",
        markersize=11,
        markerfacecolor="none",
        label=f"best: step {best.step:,} ({best.loss:.3f})",
    )


MOST_METRICS = 4
"""Metrics that fit below the losses."""


def _shown(curve: Curve) -> list[str]:
    """Return the headlines that some step has measured."""
    return [name for name in curve.headlines if _points(curve.train, name)][:MOST_METRICS]


def _points(points: Iterable[TrainPoint | EvalPoint], name: str) -> list[tuple[int, float]]:
    return [(point.step, value) for point in points if (value := point.metrics.get(name)) is not None]


def _draw_metric(axes: Axes, curve: Curve, name: str) -> None:
    import numpy as np

    found = _points(curve.train, name)
    steps, values = np.array([step for step, _ in found]), np.array([value for _, value in found])
    if len(values) >= 30:
        axes.plot(steps, values, color=TRAIN, alpha=0.28, linewidth=0.7)
        steps, values = thin_out(steps, values)
        values = smooth(values, len(values) // 50)
    axes.plot(steps, values, color=TRAIN, linewidth=1.5)
    if held := _points(curve.evals, name):
        axes.plot(*zip(*held, strict=True), color=VALIDATION, linewidth=1.2, marker="o", markersize=4)
        axes.axvline(curve.best_eval.step, color=VALIDATION, linewidth=0.8, linestyle=":")
    axes.set_title(name, loc="left", fontsize=10, color=INK, parse_math=False)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.tick_params(colors=INK, labelsize=8, length=0)
    leave_the_bottom(axes, LR)


def _draw_lr(axes: Axes, curve: Curve) -> None:
    right = axes.twinx()
    rates = [point.lr for point in curve.train]
    right.plot([point.step for point in curve.train], rates, color=LR, linewidth=1.0)
    right.set_ylim(0, max(max(rates) * 1.08, 1e-12))
    right.yaxis.set_major_formatter(lambda lr, _: lr_text(lr))
    right.tick_params(axis="y", colors=QUIET, labelsize=8, length=0)
    right.set_frame_on(False)
    # The learning rate is drawn under the losses, whose background must be transparent.
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)


def _draw_skipped(axes: Axes, curve: Curve) -> None:
    skipped = [point.step for point in curve.train if point.skipped]
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
            label=f"skipped ({len(skipped)})",
        )


def _limit_loss(axes: Axes, losses: Array, evals: list[float]) -> None:
    """Show the whole curve, but cut off a few outliers at the top that would flatten the rest."""
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
    axes.set_ylabel("loss", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.margins(x=0.015)
    axes.grid(axis="y", color="#e8eaed", linewidth=0.8)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    leave_the_bottom(axes, LR)
    facts = [f"{count_text(curve.parameters)} parameters", counted(curve.train[-1].step, "step")]
    facts += [f"{count_text(sum(point.tokens for point in curve.train))} tokens", curve.device]
    title = curve.title if len(curve.title) <= 70 else f"{curve.title[:69]}\u2026"
    # parse_math=False: a dollar sign in a name must not start a formula. y: else each layout looks for ticks above.
    axes.set_title(title, loc="left", y=1.0, fontsize=13, fontweight="bold", color=INK, pad=24, parse_math=False)
    line = axes.text(0, 1.025, ", ".join(filter(None, facts)), fontsize=9, color=QUIET, va="bottom", parse_math=False)
    line.set_transform(axes.transAxes)
