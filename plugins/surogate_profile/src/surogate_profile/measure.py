"""Times a worker's steps, whole and op by op.

Every op is timed where it stands in the step, once a step. So it runs on the step's own values, with the caches and
clocks that the ops before it leave. Nothing is repeated: an op that adds to its output does so once, as in training.
The learning rate is 0, which leaves the weights as they are.

On a GPU the programs run as CUDA graphs with an event between any two ops. The same steps also run without events. They
give the time of a step, and the time that an event adds on average, which is subtracted from every op. Programs that
are not captured (`use_cuda_graphs: false`, or an op without a compiled kernel) are timed with events between eager
launches. There an op that is shorter than its launch is reported with the time of the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from surogate.training.sums import with_means
from surogate.world.processes import Processes
from surogate_core.api import World
from surogate_core.batch import StepBatch
from surogate_core.runtime.cuda import CudaExecutor
from surogate_core.runtime.worker import Execute, Executor, Worker
from surogate_core.train import optimizer_step

WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Times:
    """The result of `measure`.

    steps: seconds of each step. ops: (name of the program, index of the op) -> seconds of every call in those steps.
    event_seconds: subtracted from every call for the event after it. method: in words.
    """

    steps: tuple[float, ...]
    ops: Mapping[tuple[str, int], Sequence[float]]
    event_seconds: float
    method: str


def measure(worker: Worker, batches: Sequence[StepBatch], means: Sequence[str] = ()) -> Times:
    """Time one step for each of `batches`. `worker` must be started. `means`: those of the prepass of the loss."""
    prepare = partial(with_means, means, worker=worker, reported=worker.assembly.reported, processes=Processes(World()))
    time_steps, executor = partial(_time_steps, worker, batches, prepare), worker.executor
    if isinstance(executor, CudaExecutor) and executor.captured:
        return _measure_graphs(executor, time_steps)
    return _measure_eager(executor, time_steps)


def _measure_graphs(executor: CudaExecutor, time_steps: Callable[..., tuple[float, ...]]) -> Times:
    clock = StreamClock(executor.stream)
    runs: list[tuple[Any, Any]] = []

    def run_whole(program: str, labels: int | None) -> None:
        start = clock.now()
        executor.run(program, labels)
        runs.append((start, clock.now()))

    steps = time_steps(clock, run_whole, runs.clear)
    graphs = GraphsWithEvents(executor, clock)
    time_steps(clock, graphs.run, graphs.calls.clear)
    count = sum(map(len, graphs.calls.values()))
    added = sum(map(sum, graphs.calls.values())) - sum(clock.seconds(*run) for run in runs)
    event_seconds = max(added, 0.0) / max(count, 1)
    ops = {key: [max(s - event_seconds, 0.0) for s in seconds] for key, seconds in graphs.calls.items()}
    return Times(steps, ops, event_seconds, "CUDA graphs with an event between ops")


def _measure_eager(executor: Executor, time_steps: Callable[..., tuple[float, ...]]) -> Times:
    on_gpu = isinstance(executor, CudaExecutor)
    clock: Clock = StreamClock(executor.stream) if isinstance(executor, CudaExecutor) else Clock()
    runs: list[tuple[str, list[Any]]] = []

    def run_by_op(program: str, labels: int | None) -> None:
        runs.append((program, walk(executor, clock, program, labels)))

    steps = time_steps(clock, run_by_op, runs.clear)
    ops: dict[tuple[str, int], list[float]] = {}
    for program, moments in runs:
        _record(ops, program, moments, clock)
    return Times(steps, ops, 0.0, "events between eager launches" if on_gpu else "each op by the host's clock")


def _time_steps(
    worker: Worker,
    batches: Sequence[StepBatch],
    prepare: Callable[[StepBatch], StepBatch],
    clock: Clock,
    execute: Execute,
    forget: Callable[[], None],
) -> tuple[float, ...]:
    """Return the seconds of a step for each of `batches`, whose programs `execute` runs.

    Calls `forget` between the warm-up and the steps. On a GPU the steps are queued after the warm-up without waiting,
    as in training, so the GPU waits for the host only after a prepass.
    """
    worker.execute_by(execute)
    for index in range(WARM_UP_STEPS):
        optimizer_step(worker, prepare(batches[index % len(batches)]), step=1, lr=0.0)
    forget()
    moments = [clock.now()]
    for batch in batches:
        optimizer_step(worker, prepare(batch), step=1, lr=0.0)
        moments.append(clock.now())
    worker.settle()
    worker.execute_by(worker.executor.run)
    return tuple(clock.seconds(*pair) for pair in pairwise(moments))


def walk(executor: Executor, clock: Clock, program: str, labels: int | None) -> list[Any]:
    """Run `program` op by op. Returns the moments at its start and after every op."""
    moments = [clock.now()]
    executor.walk(program, lambda index: moments.append(clock.now()), labels)
    return moments


def _record(calls: dict[tuple[str, int], list[float]], program: str, moments: list[Any], clock: Clock) -> None:
    for index, pair in enumerate(pairwise(moments)):
        calls.setdefault((program, index), []).append(clock.seconds(*pair))


class Clock:
    """Moments of the device that runs the ops: of the processor."""

    def now(self) -> Any:
        """The moment at which the work enqueued so far is done."""
        return perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two moments that have passed."""
        return float(end - start)


class StreamClock(Clock):
    """Events on a CUDA stream. Inside a capture they become nodes of the graph, which every replay records."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record(self._stream)
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000


class GraphsWithEvents:
    """Runs programs as CUDA graphs with an event between any two ops. calls: as `Times.ops`, events included.

    A graph is captured when its program first runs, for each number of graph segments that batches need.
    """

    def __init__(self, executor: CudaExecutor, clock: StreamClock) -> None:
        self.calls: dict[tuple[str, int], list[float]] = {}
        self._executor = executor
        self._clock = clock
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, list[torch.cuda.Event]]] = {}

    def run(self, program: str, labels: int | None) -> None:
        """Run `program` and wait for it: the next replay of its graph records the same events."""
        executor = self._executor
        with torch.cuda.stream(executor.stream):
            if program in executor.captured:
                graph, events = self._graph(program, labels)
                graph.replay()
            else:
                events = walk(executor, self._clock, program, labels)
        executor.stream.synchronize()
        _record(self.calls, program, events, self._clock)

    def _graph(self, program: str, labels: int | None) -> tuple[torch.cuda.CUDAGraph, list[torch.cuda.Event]]:
        key = program, self._executor.segments_needed(program, labels)
        if key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            events = walk(self._executor, self._clock, program, labels)
            graph.capture_end()
            self._graphs[key] = graph, events
        return self._graphs[key]
