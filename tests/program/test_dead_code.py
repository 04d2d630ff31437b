"""`dead_code` removes exactly the ops whose results are not used."""

from __future__ import annotations

import pytest
import torch
from random_programs import VOCABULARY, Run, family
from small_programs import INIT, train

from surogate_core.api import Value
from surogate_core.program.builder import Builder
from surogate_core.program.passes.dead_code import dead_code
from surogate_core.program.verify import verify

T, C = 4, 6


@pytest.mark.parametrize("seed", range(20))
def test_removing_dead_ops_does_not_change_results(seed: int) -> None:
    trimmed, whole = (Run(family(seed, trim=trim)) for trim in (True, False))
    assert len(trimmed.family.trained.ops) <= len(whole.family.trained.ops)
    for run in (trimmed, whole):
        run.micro_step("micro_first")
    for name, value in whole.results().items():
        assert torch.equal(value, trimmed.results()[name]), f"seed {seed}: {name}"


@pytest.mark.parametrize("seed", range(40))
def test_every_remaining_op_is_needed(seed: int) -> None:
    """A remaining op changes a state, writes a value that outlives the program or that a later op reads."""
    program = family(seed).trained
    for index, op in enumerate(program.ops):
        read_later = {v for later in program.ops[index + 1 :] for v in later.ins}
        needed = any(v.role != "act" or v in read_later or v in program.outputs for v in op.outs)
        assert needed or op.changes, f"seed {seed}: op {index} {op.kind} is dead"


def test_dead_code_is_idempotent() -> None:
    for seed in range(10):
        program = family(seed).trained
        assert dead_code(program, VOCABULARY).ops == program.ops, f"seed {seed}"


def _two_layers(b: Builder) -> Value:
    x = b.apply("linear", b.input("x", (T, C), "fp64"), b.param("first", (C, C), INIT), b.param("bias", (C,), INIT))
    norm = b.apply("rmsnorm", x, b.param("norm", (C,), INIT), eps=1e-5)
    y = b.apply("linear", norm, b.param("second", (C, C), INIT))
    return b.apply("toy_dot", y, b.input("direction", (T, C), "fp64"))


@pytest.mark.parametrize(
    ("trains", "backward"),
    [
        (("first", "bias", "norm", "second"), "dot wgrad dgrad norm wgrad bgrad"),
        (("first",), "dot dgrad norm wgrad"),
        (("bias",), "dot dgrad norm bgrad"),
        (("norm",), "dot dgrad norm"),
        (("second",), "dot wgrad"),
    ],
)
def test_frozen_params_leave_no_backward_ops(trains: tuple[str, ...], backward: str) -> None:
    trained = train(_two_layers, trainable=lambda p: p.name in trains)
    short = {"reference_vjp": "dot", "linear_wgrad": "wgrad", "linear_dgrad": "dgrad", "linear_bgrad": "bgrad"}
    kinds = [op.kind for op in trained.programs["micro_first"].ops if op.phase == "backward"]
    assert " ".join(short.get(kind, "norm") for kind in kinds) == backward


@pytest.mark.parametrize("trains", ["first", "norm"])
def test_an_op_becomes_the_kind_of_its_first_output_where_the_others_are_not_read(trains: str) -> None:
    trained = train(_two_layers, trainable=lambda p: p.name == trains)
    (op,) = (op for op in trained.programs["micro_first"].ops if op.kind.startswith("rmsnorm_"))
    assert (op.kind, len(op.outs)) == (("rmsnorm_dgrad", 1) if trains == "first" else ("rmsnorm_bwd", 2))


def test_an_op_whose_first_output_is_not_read_keeps_its_kind() -> None:
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"):
        x, w = b.input("x", (T, C), "fp32"), b.input("w", (C,), "fp32")
        _, dw = b.emit("rmsnorm_bwd", x, x, w, b.input("rstd", (T,), "fp32"))
        program = b.program("weight alone", (dw,))
    assert dead_code(program, VOCABULARY).ops == program.ops


def test_ops_that_change_states_are_kept_even_if_their_outputs_are_not_read() -> None:
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"):
        x = b.input("x", (T, C), "fp32")
        seen = b.emit("toy_watch", x, b.state("zero", (), "fp32", None))
        b.apply("swiglu", x)
        program = b.program("changes")
    verify(program, VOCABULARY)
    assert seen[0].role == "act"
    assert [op.kind for op in dead_code(program, VOCABULARY).ops] == ["toy_watch"]
