"""The finite check finds the first op that writes NaN or infinity, in small programs with a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_programs import VOCABULARY
from small_programs import INIT
from torch import Tensor

from surogate_core.api import HFTensor, WeightMap
from surogate_core.errors import ConfigError, NonFiniteError
from surogate_core.memory.plan import plan_programs
from surogate_core.program.builder import Builder
from surogate_core.program.op import Program, Stage
from surogate_core.program.passes.in_place import in_place
from surogate_core.runtime import finite_check as finite
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.finite_check import FiniteCheck, all_finite, contents, refuse_nonfinite_weights
from surogate_core.runtime.reference import ReferenceExecutor

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of four elements, so that small tensors have several."""
    monkeypatch.setattr(finite, "_CHUNK", 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", range(12))
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_single_non_finite_element_is_found_at_any_index(dtype: torch.dtype, index: int, bad: float) -> None:
    x = torch.arange(12.0, dtype=dtype).view(2, 2, 3)
    assert all_finite([x]) and contents(x).finite
    x.view(-1)[index] = bad
    held = contents(x)
    assert not all_finite([torch.zeros(3), x, torch.zeros(3)])
    assert held.first == (index // 6, index // 3 % 2, index % 3)
    assert (held.n_nan, held.n_inf, held.size) == ((1, 0, 12) if bad != bad else (0, 1, 12))


def test_all_non_finite_elements_are_counted() -> None:
    x = torch.zeros(11)
    x[3], x[4], x[9], x[10] = NAN, INF, -INF, NAN
    assert str(contents(x)) == "2 NaN and 2 inf of 11, first at [3]"
    assert str(contents(torch.tensor([1.0, -3e38]))) == "finite, largest 3e+38"
    assert contents(torch.tensor(INF)).first == ()


def test_fp8_is_checked_and_integers_are_not() -> None:
    x = torch.ones(6).to(torch.float8_e5m2)
    assert all_finite([x])
    x.view(torch.uint8)[5] = 0x7C  # infinity of E5M2
    assert contents(x).n_inf == 1 and not all_finite([x])
    assert all_finite([torch.full((4,), -1, dtype=torch.int32), torch.empty(0)])


# --------------------------------------------------------------------------------------------------- after every op


class Watched:
    """A program that is run op by op with a check after each; then `fault(index)` may change a buffer."""

    def __init__(self, emit: Callable[[Builder], Any], name: str = "micro_first", stage: Stage = "micro") -> None:
        b = Builder(VOCABULARY, "fp32")
        with b.record("forward"), b.block(3):
            emit(b)
            program = in_place(replace(b.program(name, stage=stage), first=stage == "micro"), VOCABULARY)
        memory = plan_programs((program,), b.declared, lambda op: 0)
        self.buffers = Buffers(memory, poison=True)
        self.program = program
        self.executor = ReferenceExecutor({name: program}, VOCABULARY, self.buffers)
        self.values = {value.name: value for value in program.values()}
        for role in ("input", "param", "grad", "state"):
            self.buffers.segment(role).zero_()
        assembly: Any = SimpleNamespace(all_programs={name: program})
        self.check = FiniteCheck(assembly, self.buffers, lambda op: f"acme 1.0 ({op.kind})", steps_done=6)

    def view(self, name: str) -> Tensor:
        return self.buffers.view(self.values[name], self.program.name)

    def run(self, fault: Callable[[int], Any] = lambda index: None) -> None:
        def after(index: int) -> None:
            self.check(self.program, index)
            fault(index)

        self.executor.walk(self.program.name, after)

    def stopped(self, fault: Callable[[int], Any] = lambda index: None) -> str:
        with pytest.raises(NonFiniteError) as error:
            self.run(fault)
        self.error = error.value
        return str(error.value)


def chain(b: Builder) -> None:
    """y = x + x; z = y + y; w = z + z."""
    x = b.input("x", (2, 3), "fp32")
    for label in "yzw":
        x = b.apply("add", x, x, label=label)


def test_finite_values_pass() -> None:
    Watched(chain).run()


def test_the_op_that_overflows_is_named_and_its_inputs_are_finite() -> None:
    run = Watched(chain)
    run.view("x")[1, 2] = 1e38
    message = run.stopped()
    assert message.startswith("step 7, micro-step 1: add wrote NaN or inf.\n  op       1 of micro_first: ")
    assert "block 3, forward" in message and "run by   acme 1.0 (add)" in message and "test_finite.py:" in message
    assert "  wrote    3.z:fp32[2,3]\n           1 inf of 6, first at [1, 2]\n" in message
    assert "  read     3.y:fp32[2,3]\n           finite, largest 2e+38\n" in message
    assert run.error.weights_whole and run.error.exit_code == 3


def test_an_op_with_a_non_finite_input_passes_it_on() -> None:
    run = Watched(chain)
    run.view("x")[0, 0] = NAN
    message = run.stopped()
    assert (
        "op       0 of" in message
        and "passed on inputs that are not finite: x is written by the training loop" in message
    )


def test_a_value_that_is_overwritten_after_its_check_is_reported() -> None:
    """For example by a kernel that writes past the end of its buffer."""
    run = Watched(chain)
    message = run.stopped(lambda index: run.view("3.y")[1].fill_(INF) if index == 0 else None)
    assert "op       1 of" in message and "read     3.y:fp32[2,3]\n           3 inf of 6, first at [1, 0]" in message
    assert "3.y was finite when it was written, and was overwritten since" in message


def test_a_gradient_that_is_accumulated_is_checked() -> None:
    def emit(b: Builder) -> None:
        x, w = b.input("x", (2, 3), "fp32"), b.param("w", (2, 3), INIT)
        b.emit("add", x, x, outs=[b.grad(w, "fp32")], accumulate=frozenset({0}))

    run = Watched(emit)
    run.view("grad.w").fill_(3e38)
    run.view("x").fill_(5e37)
    assert "wrote    grad.w:fp32[2,3]\n           6 inf of 6, first at [0, 0]" in run.stopped()


def test_an_input_that_was_overwritten_in_place_is_not_blamed() -> None:
    def emit(b: Builder) -> None:
        x = b.apply("swiglu", b.input("x", (2, 6), "fp32"), label="y")
        b.apply("linear_add", b.input("r", (2, 3), "fp32"), b.param("w", (3, 3), INIT), x, label="z")

    run = Watched(emit)
    run.view("r").fill_(1e30)
    run.view("w").fill_(1e30)
    printed = run.stopped()
    assert "op       1 of micro_first: linear_add" in printed and "Its inputs are finite" in printed
    assert "3.y:fp32" not in printed


def test_after_an_op_has_changed_weights_they_are_not_whole() -> None:
    def emit(b: Builder) -> None:
        x, w = b.input("x", (3,), "fp32"), b.param("w", (3,), INIT)
        b.emit("add", x, x, outs=[w])
        b.apply("add", w, w, label="next")

    run = Watched(emit, "update", "update")
    run.view("x").fill_(1e38)
    assert run.stopped().startswith("step 6, update: add wrote") and not run.error.weights_whole


def test_only_the_largest_of_many_inputs_are_listed() -> None:
    def emit(b: Builder) -> None:
        grads = [b.grad(b.param(f"w{i}", (3,), INIT), "fp32") for i in range(40)]
        outs = [b.state(name, (), "fp32", INIT) for name in ("norm", "clip_coef")]
        b.emit("global_norm", *grads, outs=outs, max_norm=1.0)

    run = Watched(emit, "update", "update")
    run.view("grad.w31").fill_(3e38)
    message = run.stopped()
    assert (
        message.count("finite, largest") == 6 and "  read     grad.w31:fp32[3]" in message and "and 34 more" in message
    )
    assert "norm:fp32[]\n           1 inf of 1, first at []" in message


@pytest.mark.parametrize(
    ("runs", "moment"),
    [
        (["start"], "before the first step"),
        (["micro_first"], "step 1, micro-step 1"),
        (["micro_first", "micro_next", "micro_next"], "step 1, micro-step 3"),
        (["micro_first", "micro_next@8"], "step 1, micro-step 2"),
        (["micro_first", "micro_next", "update"], "step 1, update"),
        (["micro_first", "update", "evaluate"], "evaluation after step 1"),
        (["micro_first", "update", "evaluate", "micro_first"], "step 2, micro-step 1"),
    ],
)
def test_the_message_has_step_and_micro_step(runs: list[str], moment: str) -> None:
    given = Watched(chain)
    ops = given.program.ops
    programs = {
        "micro_first": Program("micro_first", ops, stage="micro", first=True),
        "micro_next": Program("micro_next", ops, stage="micro"),
        "micro_next@8": Program("micro_next@8", ops, stage="micro", documents=8),
        **{stage: Program(stage, ops, stage=stage) for stage in ("start", "update", "evaluate")},
    }
    assembly: Any = SimpleNamespace(all_programs=programs)
    value = torch.zeros(2, 3)
    buffers: Any = SimpleNamespace(view=lambda v, program: value, device="cpu")
    check = FiniteCheck(assembly, buffers, lambda op: "")
    for name in runs[:-1]:
        check(programs[name], 0)
        check(programs[name], 1)
    value[0, 0] = NAN
    with pytest.raises(NonFiniteError, match=f"^{moment}: add"):
        check(programs[runs[-1]], 0)


def test_the_error_for_a_non_finite_weight_names_the_tensor_of_the_checkpoint() -> None:
    weights = [WeightMap("qkv", (HFTensor("q", (4, 3)), HFTensor("k", (2, 3)))), WeightMap("w", (HFTensor("v", (3,)),))]
    params = {"qkv": torch.zeros(6, 3), "w": torch.zeros(3)}
    refuse_nonfinite_weights(params, weights, Path("model"), lambda folder, tensor: folder / f"{tensor}.safetensors")
    params["qkv"][5, 1] = INF
    with pytest.raises(
        ConfigError,
        match=r"model: weights hold NaN or inf.*\n  k\.safetensors: k \[2, 3\]: 1 inf of 6, first at \[1, 1\]$",
    ):
        refuse_nonfinite_weights(
            params, weights, Path("model"), lambda folder, tensor: folder / f"{tensor}.safetensors"
        )
