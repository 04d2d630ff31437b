"""The loop on a fake device with its own clock: the times that it reports, and when it evaluates."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from surogate.checkpoints.progress import Progress
from surogate.training import evaluation
from surogate.training.cadence import Cadence
from surogate.training.doubts import Doubts
from surogate.training.evaluation import evaluate_last
from surogate.training.interrupt import Interrupt
from surogate.training.job import Job
from surogate.training.loop import train
from surogate.training.sums import with_means
from surogate.world.processes import Processes
from surogate_core import train as steps
from surogate_core.api import EvalReport, Report, StepReport, World
from surogate_core.batch import StepBatch
from surogate_core.errors import RunStopped

LAUNCH = 0.001
"""Seconds that the host spends on enqueueing a micro-step."""


@dataclass
class Clock:
    """The host's time in seconds. Only the fakes advance it."""

    now: float = 100.0

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass
class Device:
    """Runs micro-steps one after another, each `micro_seconds(step)` long. At most `ahead` of them are queued."""

    clock: Clock
    ahead: int
    micro_seconds: Callable[[int], float]
    norm: float = 1.0
    width: int = 1
    world_size: int = 1
    free_at: float = 0.0
    queued: deque[float] = field(default_factory=deque)
    steps: int = 0

    def micro_step(self, *batches: Any, **how: Any) -> None:
        if len(self.queued) == self.ahead:
            self.clock.wait_until(self.queued.popleft())
        self.clock.now += LAUNCH
        self.free_at = max(self.free_at, self.clock.now) + self.micro_seconds(self.steps + 1)
        self.queued.append(self.free_at)

    def update(self, **how: Any) -> LateReading:
        self.steps += 1
        return LateReading(self.clock, self.free_at, self.norm)

    def gather(self) -> None:
        """Nothing is left in parts."""

    def evaluate(self, *batches: Any) -> tuple[float, ...]:
        self.free_at = max(self.free_at, self.clock.now) + 5.0
        self.clock.wait_until(self.free_at)
        return (2.0,)


@dataclass
class LateReading:
    """A reading that is ready when the device has finished, however late it is read."""

    clock: Clock
    finished_at: float
    norm: float

    @property
    def ready(self) -> bool:
        return self.clock.now >= self.finished_at

    def values(self) -> tuple[float, float]:
        self.clock.wait_until(self.finished_at)
        return 1.0, self.norm


class Recorder:
    def __init__(self) -> None:
        self.steps: list[StepReport] = []
        self.evals: list[EvalReport] = []

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self.steps.append(report)
        elif isinstance(report, EvalReport):
            self.evals.append(report)


def use_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (steps, evaluation):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: 0.0))


def run(
    monkeypatch: pytest.MonkeyPatch, *, count: int, micro: int = 8, ahead: int = 4, eval_steps: int = 0,
    validation: int = 0, micro_seconds: Callable[[int], float] = lambda step: 0.125, norm: float = 1.0,
) -> tuple[Recorder, Progress, Device]:  # fmt: skip
    clock = Clock()
    use_clock(clock, monkeypatch)
    device = Device(clock, ahead, micro_seconds, norm)
    recorder = Recorder()
    batch = SimpleNamespace(n_valid=4, n_groups=0)
    writer = SimpleNamespace(poll=lambda: None, save=lambda *given: None, wait=lambda: None)
    given: dict[str, Any] = {
        "worker": device,
        "loader": SimpleNamespace(step=lambda n: StepBatch([batch] * micro, 1000, 900, 0.0)),  # type: ignore[list-item]
        "schedule": SimpleNamespace(lr=lambda step, losses: 1e-3),
        "loggers": [recorder],
        "checkpoints": writer,
        "eval_batches": lambda: [(batch,)] * validation,
        "processes": Processes(World()),
        "interrupt": Interrupt(),
        "progress": Progress(),
        "reported": [SimpleNamespace(name="loss", per="token", of=float)],
        "doubts": Doubts([], print),
    }
    job = Job(
        **given,
        total_steps=count,
        evaluations=Cadence(eval_steps),
        saves=Cadence(),
        kept=Cadence(),
        max_nonfinite_steps=10,
        watch=lambda done: None,
    )
    train(job)
    evaluate_last(job)
    return recorder, job.progress, device


@pytest.mark.parametrize("ahead", [1, 4, 16, 1000])
@pytest.mark.parametrize("micro", [1, 8])
def test_every_step_is_reported_with_its_time_on_the_device(
    micro: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the last step, and when the queue is full, so that a step is read when the next one is nearly done."""
    recorder, progress, device = run(
        monkeypatch, count=6, micro=micro, ahead=ahead, micro_seconds=lambda step: 0.125 * step
    )
    seconds = [0.125 * step * micro for step in range(1, 7)]
    tolerance = 2 * micro * LAUNCH  # the device waits for the first launch, and for each one if nothing is queued
    for report, expected in zip(recorder.steps, seconds, strict=True):
        assert report.duration_ms / 1000 == pytest.approx(expected, abs=tolerance), report.step
        assert report.tokens_per_second == pytest.approx(1000 / expected, rel=tolerance / expected)
    assert progress.seconds == pytest.approx(device.free_at - 100.0)


def test_the_time_of_an_evaluation_does_not_count_as_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, progress, _ = run(monkeypatch, count=4, eval_steps=2, validation=3)
    assert [report.duration_ms / 1000 for report in recorder.steps] == pytest.approx([1.0] * 4, abs=0.02)
    assert [(report.step, report.duration_ms) for report in recorder.evals] == [(2, 15000.0), (4, 15000.0)]
    assert progress.seconds == pytest.approx(4.0, abs=0.05)


def test_a_step_too_short_to_measure_has_finite_tokens_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LAUNCH", 0.0)
    recorder, _, _ = run(monkeypatch, count=2, micro_seconds=lambda step: 0.0)
    assert [report.tokens_per_second < 1e10 for report in recorder.steps] == [True, True]


@pytest.mark.parametrize(("eval_steps", "evaluated"), [(0, [5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_every_evaluation_reads_the_same_batches_and_one_comes_after_the_last_step(
    eval_steps: int, evaluated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, _, _ = run(monkeypatch, count=5, eval_steps=eval_steps, validation=150)
    assert [report.step for report in recorder.evals] == evaluated
    assert [report.valid_tokens for report in recorder.evals] == [600] * len(evaluated)
    nothing, _, _ = run(monkeypatch, count=5, eval_steps=eval_steps, validation=0)
    assert nothing.evals == []


def test_an_interrupted_evaluation_ends_after_its_batch_without_a_report_and_the_weights_are_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    interrupt = Interrupt()

    def evaluated(*batches: Any) -> tuple[float, ...]:
        events.append("batch")
        interrupt._received = signal.SIGTERM
        return (2.0,)

    def save(*given: Any) -> None:
        events.append("save")

    device = Device(Clock(), 4, lambda step: 0.125)
    monkeypatch.setattr(device, "evaluate", evaluated)
    use_clock(device.clock, monkeypatch)
    recorder, batch = Recorder(), SimpleNamespace(n_valid=4, n_groups=0)
    given: dict[str, Any] = {
        "worker": device,
        "loader": SimpleNamespace(step=lambda n: StepBatch([batch], 1000, 900, 0.0)),  # type: ignore[list-item]
        "schedule": SimpleNamespace(lr=lambda step, losses: 1e-3),
        "loggers": [recorder],
        "checkpoints": SimpleNamespace(poll=lambda: None, save=save, wait=lambda: None),
        "eval_batches": lambda: [(batch,)] * 50,
        "processes": Processes(World()),
        "interrupt": interrupt,
        "reported": [SimpleNamespace(name="loss", per="token")],
        "doubts": Doubts([], print),
    }
    for eval_steps, done in ((0, 4), (2, 2)):
        events.clear()
        interrupt._received = None
        progress = Progress()
        job = Job(
            **given,
            progress=progress,
            total_steps=4,
            evaluations=Cadence(eval_steps),
            saves=Cadence(2),
            kept=Cadence(),
            max_nonfinite_steps=10,
            watch=_no_watch,
        )
        train(job)
        if not interrupt.requested:
            assert events == ["save", "save"]  # before the last evaluation, which may take long
            progress.saved = 0
            evaluate_last(job)
        assert events[-2:] == ["batch", "save"] and events.count("batch") == 1
        assert progress.saved == progress.step == done and recorder.evals == []


def test_a_run_whose_steps_were_all_skipped_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunStopped, match="all 3 steps were skipped"):
        run(monkeypatch, count=3, norm=math.nan)


def test_processes_that_wait_for_a_prepass_say_so() -> None:
    """It is no evaluation. The mean is over the groups of all processes."""
    met: list[str] = []

    def gather(value: Any, what: str) -> list[Any]:
        met.append(what)
        return [value, [[4.0], 9, 3]]

    before = SimpleNamespace(n_valid=4, n_groups=1)
    micro: Any = SimpleNamespace(before=before, given=lambda found: found)
    device: Any = Device(Clock(), 4, lambda step: 0.125)
    figures: Any = [SimpleNamespace(name="kl", per="group")]
    batch = with_means(["kl"], StepBatch([micro], 8, 4, 0.0), device, figures, SimpleNamespace(gather=gather))  # type: ignore[arg-type]
    assert batch.micro == [{"mean.kl": 1.5}] and met == ["the end of the prepass of the loss"]


def _no_watch(steps_done: int) -> None:
    raise AssertionError
