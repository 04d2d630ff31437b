"""Snapshots of weights and states in host memory are consistent. On the CPU; tests/gpu covers streams."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from models import harness
from small_programs import INIT

from surogate_core.assembly.assemble import assemble
from surogate_core.dtypes import DTYPES
from surogate_core.memory.plan import plan_programs
from surogate_core.program.builder import Builder
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.host_copy import HostCopy, copied_bytes
from surogate_core.runtime.host_memory import NoHostMemory, allocate
from surogate_core.runtime.worker import Worker
from surogate_core.standard_ops import OPS


def filled() -> Buffers:
    """Return buffers with states of every dtype and of odd sizes, filled with random bytes."""
    b = Builder({op.kind: op for op in OPS}, "fp32")
    for n, dtype in enumerate(DTYPES):
        b.state(f"state.{dtype}", (n + 1, 5), dtype, INIT)
        b.state(f"hole.{dtype}", (3000,), dtype, INIT)
    buffers = Buffers(plan_programs((b.program("load"),), b.declared, lambda op: 0))
    buffers.segment("state").random_()
    return buffers


def test_a_copy_does_not_change_with_its_values() -> None:
    buffers = filled()
    values = [v for v in buffers._plan.segments["state"].offsets if v.name.startswith("state.")]
    copied = HostCopy(buffers, values, {})
    for _ in range(2):  # the memory is reused
        buffers.segment("state").random_()
        before = {v: buffers.persistent(v).clone() for v in values}
        copied.take()
        copied.wait()
        buffers.segment("state").zero_()
        for value, tensor in before.items():
            ours = copied.view(value)
            assert (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(ours.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), value


def test_only_programs_that_write_copied_values_wait() -> None:
    """Forward and backward passes overlap with a copy."""
    config = harness.tiny_config(num_hidden_layers=1)
    assembly = assemble(harness.plan_inputs(config))
    buffers = Buffers(assembly.memory)
    states = [v for v in assembly.declared if v.role == "state" and v.name.startswith(("master.", "adamw"))]
    params = list(assembly.params.values())
    assert {"micro_first", "micro_next", "evaluate"} < assembly.all_programs.keys()
    assert "update" in HostCopy(buffers, params, assembly.all_programs).writers
    assert HostCopy(buffers, [*params, *states], assembly.all_programs).writers <= {"start", "update"}


def test_the_device_waits_once_before_the_first_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    assembly = assemble(harness.plan_inputs(harness.tiny_config(num_hidden_layers=1)))
    worker = Worker.on_cpu(assembly, harness.OPS, 1)
    copied = worker.allocate_snapshot(assembly.params.values())
    waits: list[str] = []
    stream = SimpleNamespace(wait_event=waits.append)
    monkeypatch.setattr(copied, "_main", stream)
    monkeypatch.setattr(copied, "_done", "the copy", raising=False)
    monkeypatch.setattr(copied, "_pending", True)
    for program in ("micro_first", "micro_next", "evaluate"):
        copied.before(program)
    assert not waits
    worker.update(lr=1e-3, step=1)
    worker.update(lr=1e-3, step=2)
    assert waits == ["the copy"]


def test_a_program_that_writes_values_of_the_host_waits_until_they_are_read() -> None:
    """They are not copied: their snapshot is where they are."""
    b = Builder({op.kind: op for op in OPS}, "fp32")
    held, copied = b.state("held", (4,), "fp32", INIT, place="host"), b.state("copied", (4,), "fp32", INIT)
    with b.record("update"):
        b.emit("copy", copied, outs=[held])
        update = b.program("update", stage="update")
    buffers = Buffers(plan_programs((update,), b.declared, lambda op: 0))
    snapshot = HostCopy(buffers, [held, copied], {"update": update})
    assert snapshot.view(held).data_ptr() == buffers.persistent(held).data_ptr()
    assert snapshot.view(copied).data_ptr() != buffers.persistent(copied).data_ptr()
    assert copied_bytes([held, copied]) == 16
    snapshot.take()
    writes = Thread(target=snapshot.before, args=("update",))
    writes.start()
    snapshot.before("micro_first")
    assert writes.is_alive()
    snapshot.release()
    writes.join(timeout=30)
    assert not writes.is_alive()
    snapshot.before("update")


def test_memory_that_the_system_refuses_raises_no_host_memory() -> None:
    with pytest.raises(NoHostMemory, match="the system refuses"):
        allocate(1 << 60)
