"""A watched worker on the GPU: the bits of a captured one, and the name of the op that breaks first."""

from __future__ import annotations

import pytest
import torch

from surogate_core.errors import NonFiniteError
from surogate_core.program.op import Op
from surogate_core.runtime.finite import FiniteCheck
from surogate_core.runtime.worker import Worker

from .harness import Setup

pytestmark = pytest.mark.gpu


def watched(setup: Setup) -> Worker:
    """A poisoned worker that is looked at behind every op: what an op leaves unwritten is NaN."""
    worker = setup.gpu(graphs=False, poison=True)

    def served_by(op: Op) -> str:
        return setup.registry.kernel_for(op, setup.target, "bf16").provider

    worker.watch(lambda buffers: FiniteCheck(setup.assembly, buffers, served_by))
    return worker


@pytest.mark.parametrize(
    "dtypes", [{"model_dtype": "fp32"}, {}, {"master_dtype": "fp32"}], ids=["fp32", "bf16", "mixed"]
)
def test_a_healthy_step_passes_with_the_bits_of_a_captured_one(dtypes: dict[str, str]) -> None:
    setup = Setup(recompute=frozenset({"block"}), max_documents=64, **dtypes)
    checked, captured = watched(setup), setup.gpu(graphs=True)
    for step in range(1, 4):
        assert setup.step(checked, step, step=step) == setup.step(captured, step, step=step)
        assert checked.evaluate(setup.batch(step)) == captured.evaluate(setup.batch(step))
    ours, theirs = setup.weights(checked), setup.weights(captured)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_op_that_overflows_first_is_named_with_its_provider() -> None:
    setup = Setup(model_dtype="fp32")
    worker = watched(setup)
    name = next(name for name in worker.params() if name.startswith("layers.2.") and "gate_up" in name)
    worker.params()[name].fill_(3e38)
    with pytest.raises(NonFiniteError) as stopped:
        setup.step(worker, 1)
    told = str(stopped.value)
    assert told.startswith("step 1, micro-step 1: linear wrote NaN or inf.")
    assert "linear, block 2, forward" in told and "run by   surogate-recipe-bf16" in told
    assert f"{name}:fp32" in told and "largest 3e+38" in told and stopped.value.weights_whole


def test_a_norm_that_overflows_is_named() -> None:
    """Gradients of 1e25 are finite, the sum of their squares is not."""
    setup = Setup(model_dtype="fp32")
    worker = watched(setup)
    batch = setup.batch(1)
    worker.micro_step(batch, first=True, loss_scale=1e25, tick=1)
    before = setup.weights(worker)
    with pytest.raises(NonFiniteError, match="step 1, update: global_norm wrote NaN or inf"):
        worker.update(lr=1e-3, step=1)
    after = setup.weights(worker)
    assert all(torch.equal(before[name], after[name]) for name in before)
