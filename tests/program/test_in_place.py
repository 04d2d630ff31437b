"""`in_place` marks the ops whose output may take the place of an input that nobody reads later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from random_programs import VOCABULARY, Run, family, random_labels, without_sharing
from small_programs import INIT

from surogate.reporting.program_listing import listing
from surogate_core.api import Op, Program, Value
from surogate_core.memory.plan import plan
from surogate_core.program.builder import Builder
from surogate_core.program.passes.in_place import in_place
from surogate_core.program.verify import verify

T, C = 4, 6


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_results_keep_their_bits_in_poisoned_memory(seed: int, dtype: str) -> None:
    """With values overwritten in place, without, and with memory of its own for every value."""
    given = {"dtype": dtype, "labels": random_labels(seed)}
    shared, apart = family(seed, **given), family(seed, **given, reuse=False)
    runs = [Run(shared), Run(apart), Run(shared, memory=without_sharing(shared.memory))]
    for run in runs:
        run.micro_step("micro_first")
        run.micro_step("micro_next", batch=1)
    first, *others = (run.results() for run in runs)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_random_programs_have_ops_that_work_in_place_and_take_less_memory() -> None:
    marked: list[str] = []
    smaller = 0
    for seed in range(40):
        shared, apart = family(seed), family(seed, reuse=False)
        marked += [op.kind for op in shared.programs["micro_first"].ops if op.in_place]
        with_it, without = (f.memory.arenas["micro_first"].lower_bound for f in (shared, apart))
        assert with_it <= without
        smaller += with_it < without
    assert {"linear_add", "toy_gate", "toy_gate_bwd", "toy_mul"} <= set(marked)
    assert smaller


def product_to(base: Callable[[Builder], Value], after: Callable[[Builder, Value, Value], Value]) -> Program:
    """The marked program y = linear_add(x, w, base), followed by `after(builder, base, y)`, which is its output."""
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"):
        value = base(b)
        y = b.apply("linear_add", b.input("x", (T, C), "fp32"), b.param("w", (C, C), INIT), value)
        program = in_place(b.program("p", (after(b, value, y),)), VOCABULARY)
    verify(program, VOCABULARY, "in_place")
    return program


def _activation(b: Builder) -> Value:
    return b.apply("swiglu", b.input("gate_up", (T, 2 * C), "fp32"))


def _done(b: Builder, base: Value, y: Value) -> Value:
    return y


def test_an_activation_that_is_read_for_the_last_time_is_overwritten() -> None:
    program = product_to(_activation, _done)
    op = program.ops[-1]
    assert op.in_place == {0: 2}
    arena = plan(program, [0] * len(program.ops))["device"]
    assert arena.offsets[op.ins[2]] == arena.offsets[op.outs[0]]
    assert len(arena.lives) == 1 and arena.arena_bytes == 256
    assert f"linear_add(x:fp32[{T},{C}], w:fp32[{C},{C}], ~swiglu:fp32[{T},{C}])" in listing(program)


@pytest.mark.parametrize(
    ("base", "after"),
    [
        (_activation, lambda b, base, y: b.apply("add", y, base)),
        (_activation, lambda b, base, y: base),
        (lambda b: b.input("base", (T, C), "fp32"), _done),
        (lambda b: b.param("base", (T, C), INIT), _done),
    ],
    ids=["read later", "an output", "an input", "a param"],
)
def test_what_is_needed_later_is_not_overwritten(
    base: Callable[[Builder], Value], after: Callable[[Builder, Value, Value], Value]
) -> None:
    (op,) = (op for op in product_to(base, after).ops if op.kind == "linear_add")
    assert not op.in_place


def test_a_value_that_an_op_reads_twice_is_not_overwritten() -> None:
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"):
        x = _activation(b)
        program = b.program("p", (b.apply("toy_mul", x, x),))
    assert not any(op.in_place for op in in_place(program, VOCABULARY).ops)


def test_an_output_of_another_size_or_dtype_takes_no_place() -> None:
    shrinking = replace(VOCABULARY["swiglu"], may_overwrite=lambda op: {0: 0})
    b = Builder({**VOCABULARY, "swiglu": shrinking}, "fp32")
    with b.record("forward"):
        wide = b.apply("cast", b.input("x", (T, 2 * C), "bf16"), dtype="fp32")
        program = b.program("p", (b.apply("swiglu", wide),))
    assert not any(op.in_place for op in in_place(program, b.ops).ops)


def test_a_place_is_handed_on_from_op_to_op() -> None:
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"):
        y = _activation(b)
        for i in range(5):
            y = b.apply("linear_add", b.input(f"x{i}", (T, C), "fp32"), b.param(f"w{i}", (C, C), INIT), y)
        program = in_place(b.program("p", (y,)), VOCABULARY)
    verify(program, VOCABULARY)
    arena = plan(program, [0] * len(program.ops))["device"]
    (life,) = arena.lives
    assert life.value is y and len(life.overwritten) == 5 and (life.first, life.last) == (0, 5)
    assert set(arena.offsets.values()) == {0}


def changed(program: Program, index: int, **fields: object) -> Program:
    ops: list[Op] = list(program.ops)
    ops[index] = replace(ops[index], **fields)  # type: ignore[arg-type]
    return replace(program, ops=tuple(ops))


def test_violations_are_reported() -> None:
    program = product_to(_activation, lambda b, base, y: b.apply("add", y, base))
    at = next(i for i, op in enumerate(program.ops) if op.kind == "linear_add")
    cases = [
        (changed(program, at, in_place={0: 2}), "reads swiglu.*, which an op has overwritten"),
        (changed(program, at, in_place={0: 0}), "may not write linear.* in the place of its input 0"),
        (changed(program, at + 1, in_place={0: 0}), "may not write .* in the place of its input 0"),
    ]
    kept = product_to(_activation, lambda b, base, y: base)
    at = next(i for i, op in enumerate(kept.ops) if op.kind == "linear_add")
    cases.append((changed(kept, at, in_place={0: 2}), "output swiglu.* is overwritten by an op in place"))
    for broken, message in cases:
        with pytest.raises(Exception, match=message):
            verify(broken, VOCABULARY)
