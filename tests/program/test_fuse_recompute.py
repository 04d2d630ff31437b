"""A backward op computes a dropped value again where it reads what the value is computed from, and readers follow it.

That no bit changes is tested with random programs (test_recompute.py), and the kernels against those of the separate
ops (surogate_recipes_bf16/tests/gpu).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from random_programs import VOCABULARY
from small_programs import INIT

from surogate_core.api import Op, Program, Value
from surogate_core.program.builder import Builder
from surogate_core.program.passes.recompute import recompute
from surogate_core.program.verify import verify

T, F = 6, 8


class Block:
    """The feed-forward part of a block, and its backward pass as a test writes it."""

    def __init__(self, backward: Callable[[Block], None]) -> None:
        self.b = b = Builder(VOCABULARY, "fp32")
        self.largest = b.state("largest", (), "fp32", INIT)
        self.dy = b.input("dy", (T, F), "fp32")
        with b.record("forward") as forward, b.block(0):
            self.x, self.w = b.input("x", (T, F), "fp32"), b.param("norm", (F,), INIT)
            self.norm, self.rstd = b.emit("rmsnorm", self.x, self.w, eps=1e-5)
            self.gate_up = b.apply("linear", self.norm, b.param("up", (2 * F, F), INIT), label="gate_up")
            self.hidden = b.apply("swiglu", self.gate_up)
            self.out = b.apply("linear", self.hidden, b.param("down", (F, F), INIT), label="mlp_out")
        with b.record("backward", 0) as ops:
            backward(self)
        self._program = Program("micro", (*forward, *ops), stage="micro")

    def recomputed(self, *labels: str) -> list[Op]:
        """Return the ops after the forward pass, with values of these labels dropped."""
        program = recompute(self._program, lambda value: value.label in labels, self.b)
        verify(program, VOCABULARY)
        return [op for op in program.ops if op.phase != "forward"]

    def wgrad(self, name: str, dy: Value, x: Value) -> Value:
        """Emit the gradient of a weight."""
        (grad,) = self.b.emit("linear_wgrad", dy, x, outs=[self.b.grad(self.b.param(name, (F, F), INIT), "fp32")])
        return grad

    def d_hidden(self) -> Value:
        return self.b.apply("linear_dgrad", self.dy, self.b.param("w", (F, F), INIT))


def kinds(ops: list[Op]) -> list[str]:
    return [op.kind for op in ops]


def test_the_value_costs_an_output_and_its_readers_follow_in_their_order() -> None:
    def backward(block: Block) -> None:
        block.wgrad("first", block.dy, block.hidden)
        d_hidden = block.d_hidden()
        block.wgrad("second", d_hidden, block.hidden)
        block.b.apply("swiglu_bwd", d_hidden, block.gate_up)
        block.wgrad("third", block.dy, block.hidden)

    block = Block(backward)
    ops = block.recomputed("swiglu")
    assert kinds(ops) == ["linear_dgrad", "swiglu_bwd_recompute", *["linear_wgrad"] * 3]
    assert [op.outs[0].name for op in ops[2:]] == ["grad.first", "grad.second", "grad.third"]
    assert {op.ins[1] for op in ops[2:]} == {ops[1].outs[1]}
    assert ops[1].outs[1] is not block.hidden


def test_what_the_value_is_computed_from_may_be_recomputed_as_well() -> None:
    def backward(block: Block) -> None:
        block.wgrad("first", block.dy, block.hidden)
        block.b.apply("swiglu_bwd", block.d_hidden(), block.gate_up)

    ops = Block(backward).recomputed("swiglu", "gate_up")
    assert kinds(ops) == ["linear", "linear_dgrad", "swiglu_bwd_recompute", "linear_wgrad"]


@pytest.mark.parametrize("kind", ["rmsnorm_bwd", "rmsnorm_dgrad"])
def test_a_norm_is_computed_again_by_its_backward_op_if_the_statistics_are_kept(kind: str) -> None:
    def backward(block: Block) -> None:
        block.wgrad("first", block.dy, block.norm)
        block.b.emit(kind, block.dy, block.x, block.w, block.rstd)

    assert kinds(Block(backward).recomputed("norm")) == [f"{kind}_recompute", "linear_wgrad"]
    assert kinds(Block(backward).recomputed("norm", "rstd")) == ["rmsnorm", "linear_wgrad", kind]


def _another_recomputed_op_reads_it(block: Block) -> None:
    block.b.apply("swiglu_bwd", block.d_hidden(), block.gate_up)
    block.b.apply("toy_mul", block.out, block.dy)


def _the_backward_op_depends_on_a_reader(block: Block) -> None:
    block.b.apply("swiglu_bwd", block.b.apply("toy_mul", block.dy, block.hidden), block.gate_up)


def _a_passed_op_reads_what_a_reader_writes(block: Block) -> None:
    grad = block.wgrad("first", block.dy, block.hidden)
    block.b.apply("toy_mul", grad, grad)
    block.b.apply("swiglu_bwd", block.d_hidden(), block.gate_up)


def _a_passed_op_adds_to_what_a_reader_writes(block: Block) -> None:
    grad = block.wgrad("first", block.dy, block.hidden)
    block.b.emit("linear_wgrad", block.dy, block.dy, outs=[grad], accumulate=frozenset({0}))
    block.b.apply("swiglu_bwd", block.d_hidden(), block.gate_up)


def _a_passed_op_changes_a_state_that_a_reader_reads(block: Block) -> None:
    block.b.apply("toy_watch", block.hidden, block.largest)
    block.b.apply("toy_watch", block.dy, block.largest)
    block.b.apply("swiglu_bwd", block.d_hidden(), block.gate_up)


def _another_tensor_goes_through_swiglu(block: Block) -> None:
    other = block.b.input("other", (T, 2 * F), "fp32")
    block.wgrad("first", block.dy, block.hidden)
    block.b.apply("swiglu_bwd", block.d_hidden(), other)


@pytest.mark.parametrize(
    "backward",
    [
        _another_recomputed_op_reads_it,
        _the_backward_op_depends_on_a_reader,
        _a_passed_op_reads_what_a_reader_writes,
        _a_passed_op_adds_to_what_a_reader_writes,
        _a_passed_op_changes_a_state_that_a_reader_reads,
        _another_tensor_goes_through_swiglu,
    ],
)
def test_otherwise_the_value_is_recomputed_by_an_op_of_its_own(backward: Callable[[Block], None]) -> None:
    found = kinds(Block(backward).recomputed("swiglu", "mlp_out"))
    assert "swiglu" in found and "swiglu_bwd" in found and "swiglu_bwd_recompute" not in found
