"""How ops are timed inside CUDA graphs, on a made-up GPU whose clock only moves by what is enqueued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from surogate_core.batch import MicroBatch, StepBatch
from surogate_core.runtime.cuda import CudaExecutor
from surogate_core.runtime.worker import Worker
from surogate_profile.measure import Times, measure

PROGRAMS = {"micro_first": [3.0, 1.0], "micro_next": [3.0, 2.0, 1.0], "update": [5.0]}
"""Seconds of each op."""

EVENT, BETWEEN = 0.25, 0.5
"""Seconds of an event inside a graph, and between two programs."""


class Device:
    """Work runs at once, or becomes nodes of the graph that is being captured."""

    def __init__(self) -> None:
        self.now = 0.0
        self.capturing: list[Callable[[], None]] | None = None
        self.captures = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        if self.capturing is None:
            work()
        else:
            self.capturing.append(work)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device in place of torch's CUDA events, graphs and streams."""
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool, external: bool) -> None:
            assert enable_timing and external == (device.capturing is not None)
            self.external, self.time = external, -1.0

        def record(self, stream: Any) -> None:
            def work() -> None:
                device.pass_by(EVENT if self.external else 0.0)
                self.time = device.now

            device.enqueue(work)

        def elapsed_time(self, end: Event) -> float:
            assert 0 <= self.time <= end.time
            return 1000 * (end.time - self.time)

    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            self.nodes: list[Callable[[], None]] = []
            device.capturing = self.nodes
            device.captures += 1

        def capture_end(self) -> None:
            device.capturing = None

        def replay(self) -> None:
            for node in self.nodes:
                node()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing is not None)
    yield device


class Executor(CudaExecutor):
    """`micro_next` has an op in the middle that only batches with more than 10 labels need."""

    def __init__(self, device: Device, captured: tuple[str, ...]) -> None:
        self.device, self._names = device, captured
        self._stream = cast(Any, type("Stream", (), {"synchronize": lambda self: None})())

    @property
    def captured(self) -> tuple[str, ...]:
        return self._names

    def segments_needed(self, program: str, labels: int | None) -> int:
        return 1 + (program == "micro_next" and labels is not None and labels > 10)

    def run(self, program: str, labels: int | None = None) -> None:
        self.walk(program, lambda index: None, labels)

    def walk(self, program: str, after: Callable[[int], None], labels: int | None = None) -> None:
        for index, seconds in enumerate(PROGRAMS[program]):
            if program != "micro_next" or index != 1 or labels is None or labels > 10:
                self.device.enqueue(lambda seconds=seconds: self.device.pass_by(seconds))  # type: ignore[misc]
            after(index)


class OneWorker:
    """The methods of a `Worker` that are needed."""

    width = world_size = 1
    assembly = SimpleNamespace(reported=())

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.execute: Callable[[str, int | None], None] = executor.run
        self.learning_rates: set[float] = set()

    def execute_by(self, execute: Callable[[str, int | None], None]) -> None:
        self.execute = execute

    def micro_step(
        self,
        batch: MicroBatch,
        *,
        first: bool,
        last: bool,
        loss_scale: float,
        group_scale: float,
        index: int,
        reporting: bool,
    ) -> None:
        self.execute("micro_first" if first else "micro_next", batch.n_valid)
        self.executor.device.pass_by(BETWEEN)

    def update(self, *, lr: float, step: int) -> None:
        self.learning_rates.add(lr)
        self.execute("update", None)

    def settle(self) -> None:
        return


def timed(device: Device, captured: tuple[str, ...], labels: tuple[int, ...]) -> Times:
    """Return the times of two equal steps whose micro-batches have these numbers of labels."""
    nothing = np.zeros(0, np.int32)
    micro = [MicroBatch(nothing, nothing, nothing, nothing, 0, count) for count in labels]
    worker = OneWorker(Executor(device, captured))
    times = measure(cast(Worker, worker), [StepBatch(micro, 0, sum(labels), 0.0)] * 2)
    assert worker.learning_rates == {0.0} and worker.execute == worker.executor.run
    return times


def test_the_time_of_an_event_is_found_and_subtracted(device: Device) -> None:
    times = timed(device, tuple(PROGRAMS), (20, 20, 20))
    assert times.method == "CUDA graphs with an event between ops"
    assert times.event_seconds == pytest.approx(EVENT)
    assert times.steps == pytest.approx([4 + 2 * 6 + 5 + 3 * BETWEEN] * 2)  # as without events
    found = {key: (len(calls), calls[0]) for key, calls in times.ops.items()}
    expected = {
        (program, index): (2 * (2 if program == "micro_next" else 1), pytest.approx(seconds))
        for program, ops in PROGRAMS.items()
        for index, seconds in enumerate(ops)
    }
    assert found == expected


def test_a_graph_is_captured_once_for_the_parts_that_a_batch_needs(device: Device) -> None:
    times = timed(device, tuple(PROGRAMS), (20, 20, 5))
    assert device.captures == 4  # micro_next twice
    assert sorted(times.ops["micro_next", 1]) == pytest.approx([0.0, 0.0, 2.0, 2.0])


def test_a_program_that_is_not_captured_is_timed_between_its_launches(device: Device) -> None:
    times = timed(device, ("micro_first", "micro_next"), (20, 20))
    assert device.captures == 2
    assert times.ops["update", 0] == pytest.approx([5.0, 5.0], abs=EVENT)


def test_without_any_captured_program_one_series_of_steps_says_it_all(device: Device) -> None:
    times = timed(device, (), (20, 20))
    assert (device.captures, times.event_seconds) == (0, 0.0)
    assert times.method == "events between eager launches"
    assert times.ops["micro_next", 1] == pytest.approx([2.0, 2.0])
    assert times.steps == pytest.approx([4 + 6 + 5 + 2 * BETWEEN] * 2)
