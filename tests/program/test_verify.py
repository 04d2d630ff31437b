"""`verify` accepts programs from the builder and reports violations with op, block and source line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from random_programs import VOCABULARY, family
from small_programs import INIT

from surogate_core.api import Op, Program, Value
from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_core.program.verify import verify

Values = dict[str, Value]


def sound() -> tuple[Program, Values]:
    """Return three ops of block 3: h = linear(x, w); act = swiglu(h); watched = toy_watch(act, s), which changes s."""
    b = Builder(VOCABULARY, "fp32")
    values = {
        "x": b.input("x", (4, 6), "fp32"),
        "w": b.param("w", (8, 6), INIT),
        "state": b.state("s", (), "fp32", INIT),
    }
    with b.record("forward"), b.block(3):
        values["h"] = b.apply("linear", values["x"], values["w"], label="h")
        values["act"] = b.apply("swiglu", values["h"])
        values["watched"] = b.activation("watched", (4, 4), "fp32")
        b.emit("toy_watch", values["act"], values["state"], outs=[values["watched"]])
        return b.program("sound", (values["watched"],)), values


def edited(index: int, **fields: object) -> Callable[[Program, Values], Program]:
    """Return an edit that replaces fields of op `index`. A tuple of names stands for the values of these names."""

    def edit(program: Program, values: Values) -> Program:
        changes = {k: tuple(values[n] for n in v) if isinstance(v, tuple) else v for k, v in fields.items()}
        ops = list(program.ops)
        ops[index] = replace(ops[index], **changes)
        return replace(program, ops=tuple(ops))

    return edit


def with_op(program: Program, index: int, op: Op) -> Program:
    return replace(program, ops=(*program.ops[:index], op, *program.ops[index + 1 :]))


def with_out(index: int, value: Value) -> Callable[[Program, Values], Program]:
    return lambda program, values: edited(index, outs=("new",))(program, {**values, "new": value})


def reordered(*order: int) -> Callable[[Program, Values], Program]:
    return lambda program, values: replace(program, ops=tuple(program.ops[i] for i in order))


def changing(index: int) -> Callable[[Program, Values], Program]:
    return lambda program, values: with_op(program, index, replace(program.ops[index], changes=(0,)))


def adding(index: int) -> Callable[[Program, Values], Program]:
    return edited(index, accumulate=frozenset({0}))


ACT = "act"
VIOLATIONS: dict[str, tuple[str, str, Callable[[Program, Values], Program]]] = {
    "read before write": ("swiglu", "reads 3.h.* before any op writes it", reordered(1, 0, 2)),
    "reads its own output": ("swiglu", "reads 3.h.* before", reordered(1, 2)),
    "second writer": ("linear", "writes 3.h.* a second time", reordered(0, 0, 1, 2)),
    "one op writes twice": (
        "toy_watch",
        "writes 3.watched.* a second time",
        edited(2, outs=("watched", "watched")),
    ),
    "changes that the definition does not have": (
        "swiglu",
        "changes its inputs \\(0,\\), by its",
        changing(1),
    ),
    "changes no state": ("toy_watch", "can change only states", edited(2, ins=("act", "h"))),
    "write to an input": ("linear", "writes the input x", with_out(0, Value("x2", (4, 8), "fp32", "input"))),
    "wrong shape": ("linear", r"should have shape \[4, 8\]", with_out(0, Value("h2", (8, 4), "fp32", ACT))),
    "wrong dtype": ("linear", "should be fp32", with_out(0, Value("h2", (4, 8), "bf16", ACT))),
    "no such dtype": ("linear", "has no known dtype", with_out(0, Value("h2", (4, 8), "fp7", ACT))),
    "duplicate name": ("linear", "two values are named 'w'", with_out(0, Value("w", (4, 8), "fp32", ACT))),
    "adds to an activation": ("linear", "only gradients and states accumulate", adding(0)),
    "adds to a param": (
        "linear",
        "only gradients and states accumulate",
        lambda program, values: adding(0)(with_out(0, Value("p", (4, 8), "fp32", "param"))(program, values), values),
    ),
    "a change recomputed": ("toy_watch", "recomputed, but it changes .s:", edited(2, phase="recompute")),
    "unknown op": ("linaer", "no plugin defines this op", edited(0, kind="linaer")),
    "too many outputs": ("linear", "has 2 outputs, its definition infers 1", edited(0, outs=("h", "act"))),
    "inputs that do not fit": ("linear", "x has 8 columns, w has 6", edited(0, ins=("h2", "w"))),
    "too few inputs": ("linear", "", edited(0, ins=("x",))),
    "too many inputs": ("swiglu", "", edited(2, kind="rmsnorm", ins=("act", "w", "x"))),
    "an activation on another lane": ("linear", "on lane comm it cannot use x", edited(0, lane="comm")),
    "no such lane": ("linear", "lane 'copy' is not one of compute, comm", edited(0, lane="copy")),
    "attribute missing": ("rmsnorm_bwd|attention", "", edited(1, kind="attention", ins=("h", "x"))),
}


def test_a_program_from_the_builder_passes() -> None:
    program, _ = sound()
    verify(program, VOCABULARY)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_reported_with_op_block_and_line(name: str) -> None:
    kind, message, edit = VIOLATIONS[name]
    program, values = sound()
    values["h2"] = Value("h2", (4, 8), "fp32", "input")
    broken = edit(program, values)
    with pytest.raises(ProgramError) as caught:
        verify(broken, VOCABULARY, "some pass")
    text = str(caught.value)
    assert re.search(message, text)
    assert re.search(
        rf"sound after some pass, op \d ({kind}|toy_watch|rmsnorm) \(block 3, .*test_verify\.py:\d+\)", text
    )


def test_an_output_that_no_op_writes_is_reported() -> None:
    program, _ = sound()
    shortened = replace(program, ops=program.ops[:2])
    with pytest.raises(ProgramError, match=r"sound: output 3\.watched.* is never written"):
        verify(shortened, VOCABULARY)


def test_a_gradient_may_be_stored_in_a_narrower_dtype() -> None:
    program, values = sound()
    gradient = Value("grad.w", (8, 6), "bf16", "grad")
    op = Op("linear_wgrad", (values["h"], values["x"]), (gradient,))
    verify(replace(program, ops=(*program.ops, op)), VOCABULARY)


@pytest.mark.parametrize("seed", range(25))
def test_every_pass_keeps_random_programs_valid(seed: int) -> None:
    """`family` verifies after each pass."""
    for dtype, grad_dtype in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")):
        family(seed, dtype=dtype, grad_dtype=grad_dtype, labels=frozenset({"norm", "rstd", "swiglu", "gated", "split"}))


# --------------------------------------------------------------------------------------------------------- the builder


@pytest.mark.parametrize(
    ("emit", "message"),
    [
        (lambda b, x, w: b.emit("linaer", x, w), "no installed plugin defines op 'linaer'"),
        (lambda b, x, w: b.emit("linear", w, x, x), "bias must have shape"),
        (lambda b, x, w: b.emit("linear", x), "linear"),
        (lambda b, x, w: b.emit("rmsnorm", x, w, w, eps=1e-6), "rmsnorm"),
        (lambda b, x, w: b.emit("attention", x, w), "attention"),
        (
            lambda b, x, w: b.emit(
                *("attention", x, b.input("cu", (2,), "int32")),
                **{"n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "seq_len": 4, "window": -1},
            ),
            "window must be positive, or 0 for none, got -1",
        ),
    ],
    ids=["unknown op", "shapes", "too few inputs", "too many inputs", "attribute missing", "attribute out of range"],
)
def test_the_builder_reports_the_line_that_emitted(emit: Callable[..., object], message: str) -> None:
    b = Builder(VOCABULARY, "fp32")
    with pytest.raises(ProgramError, match=rf"^program/test_verify\.py:\d+: .*{message}"):
        emit(b, b.input("x", (4, 6), "fp32"), b.param("w", (8, 6), INIT))


def test_names_are_unique_within_a_family() -> None:
    b = Builder(VOCABULARY, "fp32")
    b.param("w", (2,), INIT)
    with pytest.raises(ProgramError, match="'w' is declared twice"):
        b.input("w", (2,), "fp32")
    with b.record("forward"):
        names = [b.apply("cast", b.declared[0], dtype="fp32", label="w").name for _ in range(3)]
    assert len({*names, "w"}) == 4
