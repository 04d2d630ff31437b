"""`fuse_adds` replaces an addition and the products that compute its addends, and changes no result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_programs import VOCABULARY, Run, family, random_labels
from small_programs import INIT

from surogate_core.api import Program, Value
from surogate_core.program.builder import Builder
from surogate_core.program.passes.fuse_adds import fuse_adds
from surogate_core.program.verify import verify

T, C = 4, 6


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_results_keep_their_bits(seed: int, dtype: str) -> None:
    runs = [Run(family(seed, dtype=dtype, labels=random_labels(seed), fuse=fuse)) for fuse in (True, False)]
    for run in runs:
        run.micro_step("micro_first")
    fused, plain = (run.results() for run in runs)
    assert all(torch.equal(fused[name], plain[name]) for name in plain)


def test_random_programs_have_products_to_fuse() -> None:
    kinds = [op.kind for seed in range(40) for op in family(seed).trained.ops]
    expected = ("linear_add", "linear_pair", "linear_dgrad_pair")
    assert all(kinds.count(kind) > 2 for kind in expected), {kind: kinds.count(kind) for kind in expected}


def kinds_of(emit: Callable[[Builder, Value, Value, Value], Value]) -> tuple[list[str], Program]:
    """The kinds of the fused program that `emit` records in block 2, with x [T, C], w [C, C] and r [T, C]."""
    b = Builder(VOCABULARY, "fp32")
    x, w, r = b.input("x", (T, C), "fp32"), b.param("w", (C, C), INIT), b.input("r", (T, C), "fp32")
    with b.record("forward"), b.block(2):
        y = emit(b, x, w, r)
        program = fuse_adds(b.program("p", (y,)), VOCABULARY)
    verify(program, VOCABULARY, "fuse_adds")
    return [op.kind for op in program.ops], program


@pytest.mark.parametrize("order", [1, -1])
def test_a_product_adds_to_the_other_addend_on_either_side(order: int) -> None:
    kinds, program = kinds_of(lambda b, x, w, r: b.apply("add", *[b.apply("linear", x, w), r][::order], label="y"))
    assert kinds == ["linear_add"]
    (op,) = program.ops
    assert [v.name for v in op.ins] == ["x", "w", "r"] and op.outs == program.outputs and op.outs[0].label == "y"


def test_two_products_become_one_op_the_larger_first() -> None:
    def branch(b: Builder, x: Value, w: Value, r: Value) -> Value:
        base = b.apply("linear", x, w)
        inner = b.apply("linear", x, b.param("a", (2, C), INIT))
        return b.apply("add", base, b.apply("linear", inner, b.param("b", (C, 2), INIT)))

    kinds, program = kinds_of(branch)
    assert kinds == ["linear", "linear_pair"]
    assert [v.name for v in program.ops[-1].ins[1::2]] == ["w", "b"]
    assert program.ops[-1].ins[2] is program.ops[0].outs[0]


def test_of_two_products_of_which_one_has_a_bias_the_other_adds() -> None:
    def branch(b: Builder, x: Value, w: Value, r: Value) -> Value:
        base = b.apply("linear", x, w, b.param("bias", (C,), INIT))
        inner = b.apply("linear", x, b.param("a", (2, C), INIT))
        return b.apply("add", base, b.apply("linear", inner, b.param("b", (C, 2), INIT)))

    assert kinds_of(branch)[0] == ["linear", "linear", "linear_add"]


def test_a_chain_of_additions_is_fused_one_by_one() -> None:
    def chain(b: Builder, x: Value, w: Value, r: Value) -> Value:
        for name in "uv":
            r = b.apply("add", b.apply("linear", x, b.param(name, (C, C), INIT)), r)
        return r

    assert kinds_of(chain)[0] == ["linear_add", "linear_add"]


def _read_again(b: Builder, x: Value, w: Value, r: Value) -> Value:
    y = b.apply("linear", x, w)
    return b.apply("toy_mul", b.apply("add", y, r), y)


def _to_itself(b: Builder, x: Value, w: Value, r: Value) -> Value:
    y = b.apply("linear", x, w)
    return b.apply("add", y, y)


def _with_bias(b: Builder, x: Value, w: Value, r: Value) -> Value:
    return b.apply("add", b.apply("linear", x, w, b.param("bias", (C,), INIT)), r)


def _of_a_state(b: Builder, x: Value, w: Value, r: Value) -> Value:
    return b.apply("add", b.apply("linear", x, b.state("s", (C, C), "fp32", INIT)), r)


@pytest.mark.parametrize("emit", [_read_again, _to_itself, _with_bias, _of_a_state], ids=lambda f: f.__name__)
def test_a_product_that_cannot_be_moved_is_left_alone(emit: Callable[..., Value]) -> None:
    kinds, _ = kinds_of(emit)
    assert kinds[:2] == ["linear", "add"]


def test_a_sum_that_is_a_gradient_is_left_alone() -> None:
    """Micro-steps add to it, which no product does that adds to something else too."""
    b = Builder(VOCABULARY, "fp32")
    with b.record("backward"):
        y = b.apply("linear", b.input("x", (T, C), "fp32"), b.param("w", (C, C), INIT))
        table = b.param("table", (T, C), INIT)
        b.emit("add", y, b.input("r", (T, C), "fp32"), outs=[b.grad(table, "fp32")])
        program = b.program("p")
    assert fuse_adds(program, VOCABULARY).ops == program.ops


def test_an_output_of_the_program_is_kept() -> None:
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"):
        y = b.apply("linear", b.input("x", (T, C), "fp32"), b.param("w", (C, C), INIT))
        total = b.apply("add", y, b.input("r", (T, C), "fp32"))
        program = b.program("p", (y, total))
    assert fuse_adds(program, VOCABULARY).ops == program.ops
