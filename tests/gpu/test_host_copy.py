"""A host copy taken between two GPU steps is consistent, although the next steps are enqueued immediately."""

from __future__ import annotations

import pytest
import torch

from surogate_core.runtime.host_copy import HostCopy
from surogate_core.runtime.worker import Worker

from .harness import Setup

pytestmark = pytest.mark.gpu


def everything(setup: Setup, worker: Worker) -> dict[str, torch.Tensor]:
    worker.settle()
    kept = [v for v in setup.assembly.declared if v.role in ("param", "state")]
    return {v.name: raw(worker.buffers.persistent(v)).cpu() for v in kept}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that equal NaNs compare equal."""
    return tensor.reshape(-1).view(torch.uint8).clone()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_copy_holds_the_state_of_its_step_while_training_continues(graphs: bool) -> None:
    setup = Setup(model_dtype="bf16", master_dtype="fp32", optimizer_state_dtype="bf16", param_grad_dtype="bf16")
    worker, alone = setup.gpu(graphs=graphs), setup.gpu(graphs=graphs)
    readings = (setup.assembly.loss, setup.assembly.eval_loss, setup.assembly.grad_norm)
    kept = [v for v in setup.assembly.declared if v.role in ("param", "state") and v not in readings]
    copied = worker.allocate_snapshot(kept)
    assert {"micro_first", "micro_next", "evaluate"}.isdisjoint(copied.writers) and "update" in copied.writers
    for step in range(1, 30, 3):
        setup.step(worker, step, step=step)
        before = everything(setup, worker)
        worker.snapshot()
        for more in (1, 2):
            setup.step(worker, step + more, step=step + more)
        copied.wait()
        for value in kept:
            assert torch.equal(raw(copied.view(value)), before[value.name]), (step, value)
        assert any(not torch.equal(after, before[name]) for name, after in everything(setup, worker).items())
    for step in range(1, 31):
        setup.step(alone, step, step=step)
    ours, theirs = everything(setup, worker), everything(setup, alone)
    assert all(torch.equal(ours[v.name], theirs[v.name]) for v in kept), "taking a copy changed the training"
    worker.close()


def test_copies_are_pinned_and_asynchronous() -> None:
    """Taking a copy returns while the device is still busy. Only `wait` blocks the host."""
    setup = Setup(model_dtype="bf16", seq_len=128)
    worker = setup.gpu()
    copied: HostCopy = worker.allocate_snapshot(setup.assembly.params.values())
    assert copied.view(next(iter(setup.assembly.params.values()))).is_pinned()
    torch.cuda.synchronize()
    with torch.cuda.stream(worker.executor.stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
    worker.snapshot()
    assert not copied._done.query()
    copied.wait()
    assert copied._done.query()
    worker.close()
