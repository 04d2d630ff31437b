"""A skipped step changes no state, also none that micro-steps write. Without such states no op is added."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import tracking
from models import harness
from models.harness import OPS, PlannedModel, plan_inputs, random_documents, tiny_config, valid_tokens
from torch import Tensor

from surogate.runs.saved_values import kept_values
from surogate_core.assembly.assemble import assemble
from surogate_core.errors import ProgramError
from surogate_recipes_bf16.recipe import BF16

ROWS = [[document] for document in random_documents([11, 13, 9, 16], 97)]
CONFIG = tiny_config(num_hidden_layers=2)


@pytest.fixture
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, definition in tracking.OPS.items():
        monkeypatch.setitem(harness.OPS, kind, definition)


class Run:
    """A run of a recipe with a history of maxima, with two micro-steps per optimizer step."""

    def __init__(self) -> None:
        self.model = PlannedModel(CONFIG, 2, 16, recipe=tracking.tracking(BF16), grad_accum_steps=2)
        torch.manual_seed(1)
        for value in self.model.assembly.declared:
            view = self.model.buffers.persistent(value)
            if value.role == "param":
                view.normal_(0, 0.05)
            elif value.role == "state" and value.init is not None:
                view.zero_()
        self.losses: list[float] = []

    def step(self, number: int, scale: float | None = None) -> None:
        """Run an optimizer step. A `scale` that is not finite makes it a skipped one."""
        documents = [document for row in ROWS for document in row]
        scale = 1 / valid_tokens(documents) if scale is None else scale
        self.model.micro_step(ROWS[:2], scale)
        loss = self.model.micro_step(ROWS[2:], scale, first=False)
        self.model.update(number, 1e-2)
        self.losses.append(loss)

    def evaluate(self) -> None:
        self.model.write(ROWS[:2], 1.0)
        self.model.executor.run("evaluate")

    def history(self) -> list[float]:
        value = next(v for v in self.model.assembly.declared if v.name == tracking.HISTORY)
        return [float(x) for x in self.model.buffers.persistent(value)]

    def kept(self) -> dict[str, Tensor]:
        """Return copies of everything that a step carries into the next one."""
        assembly = self.model.assembly
        values = [v for v in assembly.declared if v.role == "param"] + kept_values(assembly, assembly.params, "fp32")
        return {v.name: self.model.buffers.persistent(v).clone() for v in values}


def different(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys() and tracking.HISTORY in left
    return [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.usefixtures("_toys")
@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_skipped_step_changes_no_bit_of_any_state(scale: float) -> None:
    run = Run()
    run.step(1)
    before = run.kept()
    run.step(2, scale)
    assert different(before, run.kept()) == []
    run.step(2)
    assert set(different(before, run.kept())) >= {tracking.HISTORY}


@pytest.mark.usefixtures("_toys")
def test_a_run_with_a_skipped_step_is_bit_identical_to_one_without() -> None:
    skipped, straight = Run(), Run()
    for number, scale in ((1, None), (2, float("inf")), (2, None), (3, None)):
        skipped.step(number, scale)
    for number in (1, 2, 3):
        straight.step(number)
    assert different(skipped.kept(), straight.kept()) == []
    assert [loss for i, loss in enumerate(skipped.losses) if i != 1] == straight.losses


@pytest.mark.usefixtures("_toys")
def test_micro_steps_share_a_pending_state_that_the_update_commits() -> None:
    run = Run()
    assert run.history() == [0, 0]
    run.model.micro_step(ROWS[:2], 0.01)
    assert run.history() == [0, 0]  # not committed yet: the step may be skipped
    run.model.micro_step(ROWS[2:], 0.01, first=False)
    run.model.update(1, 0.0)
    largest, before = run.history()
    assert largest >= before > 0  # the second micro-step found what the first had written


@pytest.mark.usefixtures("_toys")
def test_an_evaluation_changes_no_state() -> None:
    run = Run()
    run.step(1)
    before = run.kept()
    run.evaluate()
    assert different(before, run.kept()) == []


def test_without_written_states_no_op_is_added() -> None:
    assembly = assemble(plan_inputs(CONFIG))
    assert assembly.pending == ()
    assert "pending" not in {step.name for step in assembly.passed.passes}
    assert "commit" not in {op.kind for program in assembly.all_programs.values() for op in program.ops}


@pytest.mark.usefixtures("_toys")
def test_a_state_that_a_step_writes_before_it_reads_it_needs_no_copy() -> None:
    assembly = assemble(plan_inputs(CONFIG, recipe=tracking.noting(BF16)))
    assert tracking.NOTED in {v.name for v in assembly.declared} and assembly.pending == ()


@pytest.mark.usefixtures("_toys")
def test_a_pending_copy_is_planned_but_not_saved() -> None:
    assembly = Run().model.assembly
    (copy,) = assembly.pending
    assert copy.name == f"pending.{tracking.HISTORY}" and copy in assembly.memory.segments["state"].offsets
    names = [v.name for v in kept_values(assembly, assembly.params, "fp32")]
    assert tracking.HISTORY in names and copy.name not in names


@pytest.mark.usefixtures("_toys")
def test_an_op_that_reads_a_pending_state_cannot_be_recomputed() -> None:
    def recomputed(parts: Sequence[str]) -> None:
        assemble(plan_inputs(CONFIG, recipe=tracking.tracking(BF16), recompute=frozenset(parts)))

    recomputed([])
    with pytest.raises(ProgramError, match=r"toy_scaled .* is recomputed, and reads the state amax_history"):
        recomputed(["rmsnorm"])


def test_the_toy_ops_are_not_standard_ops() -> None:
    assert not tracking.OPS.keys() & OPS.keys()
