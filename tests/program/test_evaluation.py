"""The evaluation program contains no training-only ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_programs import VOCABULARY, family
from small_programs import INIT

from surogate_core.api import Op, Program
from surogate_core.program.builder import Builder
from surogate_core.program.passes.evaluation import for_evaluation
from surogate_core.program.verify import verify

OPS = {**VOCABULARY, "cast": replace(VOCABULARY["cast"], training_only=True)}
"""`cast` is marked as training-only. The tests cast to the same dtype, so that removing a cast changes no value."""


def forward() -> tuple[Program, list[Op]]:
    """Return the program x -> cast -> cast -> swiglu -> cast and its ops."""
    b = Builder(OPS, "fp32")
    with b.record("forward") as ops:
        x = b.param("x", (4, 8), INIT)
        twice = b.apply("cast", b.apply("cast", x, dtype="fp32"), dtype="fp32")
        loss = b.apply("cast", b.apply("swiglu", twice), dtype="fp32")
        program = b.program("forward", (loss,))
    return program, ops


def test_readers_of_a_removed_op_read_its_input() -> None:
    program, ops = forward()
    evaluated = for_evaluation(program, OPS)
    verify(evaluated, OPS)
    (swiglu,) = evaluated.ops
    assert (evaluated.name, swiglu.kind, swiglu.ins) == ("evaluate", "swiglu", ops[0].ins)
    assert evaluated.outputs == swiglu.outs == ops[2].outs


@pytest.mark.parametrize("seed", range(3))
def test_other_ops_are_unchanged(seed: int) -> None:
    program = family(seed).source.program
    evaluated = for_evaluation(program, VOCABULARY)
    assert (evaluated.ops, evaluated.outputs) == (program.ops, program.outputs)
