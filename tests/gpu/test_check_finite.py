"""Finite checks on the GPU: bit-identical to a captured run, and errors name the first op with a non-finite result."""

from __future__ import annotations

import pytest
import torch

from surogate_core.errors import NonFiniteError
from surogate_core.program.op import Op
from surogate_core.runtime.finite_check import FiniteCheck
from surogate_core.runtime.worker import Worker

from .harness import Setup

pytestmark = pytest.mark.gpu


def watched(setup: Setup) -> Worker:
    """Return a worker that checks the outputs of every op. Buffers are poisoned: elements not written are NaN."""
    worker = setup.gpu(graphs=False, poison=True)

    def served_by(op: Op) -> str:
        return setup.registry.kernel_for(op, setup.target, "bf16").provider

    worker.watch(lambda buffers: FiniteCheck(setup.assembly, buffers, served_by))
    return worker


@pytest.mark.parametrize(
    "dtypes", [{"model_dtype": "fp32"}, {}, {"master_dtype": "fp32"}], ids=["fp32", "bf16", "mixed"]
)
def test_a_checked_step_is_bit_identical_to_a_captured_one(dtypes: dict[str, str]) -> None:
    setup = Setup(recompute=frozenset({"block"}), max_documents=64, **dtypes)
    checked, captured = watched(setup), setup.gpu(graphs=True)
    for step in range(1, 4):
        assert setup.step(checked, step, step=step) == setup.step(captured, step, step=step)
        assert checked.evaluate(setup.batch(step)) == captured.evaluate(setup.batch(step))
    ours, theirs = setup.weights(checked), setup.weights(captured)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_error_names_the_first_op_that_overflows_and_its_provider() -> None:
    setup = Setup(model_dtype="fp32")
    worker = watched(setup)
    name = next(name for name in worker.params() if name.startswith("layers.2.") and "gate_up" in name)
    worker.params()[name].fill_(3e38)
    with pytest.raises(NonFiniteError) as stopped:
        setup.step(worker, 1)
    message = str(stopped.value)
    assert message.startswith("step 1, micro-step 1: linear wrote NaN or inf.")
    assert "linear, block 2, forward" in message and "run by   surogate-recipe-bf16" in message
    assert f"{name}:fp32" in message and "largest 3e+38" in message and stopped.value.weights_whole


def test_an_overflow_of_the_global_norm_is_named_and_changes_no_weight() -> None:
    """Gradients of 1e25 are finite, but the sum of their squares is not."""
    setup = Setup(model_dtype="fp32")
    worker = watched(setup)
    batch = setup.batch(1)
    worker.micro_step(batch, first=True, loss_scale=1e25, index=1)
    before = setup.weights(worker)
    with pytest.raises(NonFiniteError, match="step 1, update: global_norm wrote NaN or inf"):
        worker.update(lr=1e-3, step=1)
    after = setup.weights(worker)
    assert all(torch.equal(before[name], after[name]) for name in before)
