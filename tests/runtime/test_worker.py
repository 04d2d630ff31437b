"""The calls that a worker makes to its executor: their order, and when the host waits. The same for every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models import harness
from torch import Tensor

from surogate_core.api import LowerContext, Programs
from surogate_core.assembly.assemble import assemble
from surogate_core.batch import MicroBatch
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.comms.single import ALONE
from surogate_core.runtime.inputs import Inputs
from surogate_core.runtime.readings import ReadyReading
from surogate_core.runtime.reference import ReferenceExecutor
from surogate_core.runtime.worker import Worker


class Recorder(ReferenceExecutor):
    """A reference executor that records the calls of the worker."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[str] = []

    def run(self, program: str, labels: int | None = None) -> None:
        self.calls.append(f"run {program}")
        super().walk(program, lambda index: None, labels)

    def walk(self, program: str, after: Callable[[int], None], labels: int | None = None) -> None:
        self.calls.append(f"walk {program}")
        super().walk(program, after, labels)

    def readings(self, values: Sequence[Tensor]) -> Callable[[], ReadyReading]:
        read = super().readings(values)

        def recorded() -> ReadyReading:
            self.calls.append("read")
            return read()

        return recorded

    def capture(self) -> None:
        self.calls.append("capture")

    def wait(self) -> None:
        self.calls.append("wait")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@pytest.fixture
def worker() -> Worker:
    return make_worker()


def calibrating_worker() -> Worker:
    """Return a worker of a recipe whose first micro-steps have programs of their own."""
    recipe = harness.plan_inputs(harness.tiny_config()).recipe

    def lower(family: Programs, context: LowerContext) -> Programs:
        family = recipe.lower(family, context)
        return replace(family, calibrate=replace(family.micro, name="calibrate"))

    return make_worker(recipe=replace(recipe, lower=lower))


def make_worker(**changes: Any) -> Worker:
    config = harness.tiny_config(num_hidden_layers=1)
    # Two documents, one for each row: there are no variants.
    assembly = assemble(harness.plan_inputs(config, max_documents=2, **changes))
    buffers = Buffers(assembly.memory)
    executor = Recorder(assembly.all_programs, harness.OPS, buffers)
    return Worker(assembly, buffers, executor, Inputs(assembly.declared, assembly.memory, buffers), seed=1, comm=ALONE)


def taken(worker: Worker) -> list[str]:
    """Return the calls since the last call of this function."""
    calls: list[str] = worker.executor.calls  # type: ignore[attr-defined]
    found = [*calls]
    calls.clear()
    return found


def batch(worker: Worker) -> MicroBatch:
    """Return a batch of whole documents, one in each row."""
    inputs = worker.assembly.batch
    size = inputs.tokens.shape[0]
    zeros, targets = np.zeros(size, np.int32), np.ones(size, np.int32)
    cu_seqlens = np.arange(0, size + 1, inputs.seq_len, dtype=np.int32)
    return MicroBatch(zeros, targets, zeros, cu_seqlens, size, size)


def step(worker: Worker) -> None:
    worker.micro_step(batch(worker), first=True, loss_scale=1.0, index=0)
    worker.micro_step(batch(worker), first=False, loss_scale=1.0, index=1)
    worker.update(lr=0.1, step=1)


def test_start_waits_for_the_weights_makes_masters_captures_and_reads_once(worker: Worker) -> None:
    worker.start()
    assert taken(worker) == ["synchronize", "run start", "run derive", "capture", "read"]


def test_after_a_restore_only_derived_states_are_made(worker: Worker) -> None:
    worker.restored(lr=0.1, step=3)
    worker.start(graphs=False)
    assert taken(worker) == ["synchronize", "run derive", "read"]


def test_the_host_does_not_wait_during_a_step(worker: Worker) -> None:
    step(worker)
    assert taken(worker) == ["run micro_first", "run micro_next", "run update", "read"]


def test_an_evaluation_waits_once(worker: Worker) -> None:
    worker.evaluate(batch(worker))
    assert taken(worker) == ["run evaluate", "wait"]


def test_a_watched_worker_runs_op_by_op_without_graphs_and_waits_for_the_update(worker: Worker) -> None:
    seen: list[tuple[str, int]] = []
    worker.watch(lambda buffers: lambda program, index: seen.append((program.name, index)))
    worker.start()
    assert taken(worker) == ["synchronize", "walk start", "walk derive", "read"]
    step(worker)
    assert taken(worker) == ["walk micro_first", "walk micro_next", "walk update", "read", "wait"]
    programs = worker.assembly.programs
    order = [programs[name] for name in ("start", "micro_first", "micro_next", "update")]
    assert seen == [(program.name, index) for program in order for index in range(len(program.ops))]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_step_after_skipped_ones_calibrates_too(resumed: bool) -> None:
    worker = calibrating_worker()
    worker.params()["norm"].fill_(float("nan"))
    if resumed:
        worker.restored(lr=0.1, step=2, skipped=2)
    step(worker)
    worker.params()["norm"].fill_(1.0)
    step(worker)
    step(worker)
    runs = [call for call in taken(worker) if call.startswith(("run micro", "run calibrate"))]
    assert runs == [*["run calibrate_first", "run calibrate_next"] * 2, "run micro_first", "run micro_next"]


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_resumed_worker_does_not_calibrate_if_a_step_was_applied(skipped: int) -> None:
    worker = calibrating_worker()
    worker.restored(lr=0.1, step=2, skipped=skipped)
    step(worker)
    assert taken(worker) == ["run micro_first", "run micro_next", "run update", "read"]
