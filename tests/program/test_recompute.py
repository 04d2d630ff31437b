"""Recomputation changes when values are computed but not their contents."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
import torch
from random_programs import LABELS, VOCABULARY, Run, family, random_labels
from small_programs import INIT, everything

from surogate_core.api import Op, Program, Rewrites, Value
from surogate_core.memory.lifetimes import lifetimes, live_bytes
from surogate_core.memory.plan import plan
from surogate_core.program.builder import Builder
from surogate_core.program.differentiate import differentiate
from surogate_core.program.labels import BLOCK_INPUT
from surogate_core.program.passes.dead_code import dead_code
from surogate_core.program.passes.recompute import drops_anyway, recompute
from surogate_core.program.verify import verify

T, C = 64, 128


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(30))
def test_loss_and_gradients_are_bit_identical_for_every_set_of_dropped_values(seed: int, dtype: str) -> None:
    kept = Run(family(seed, dtype=dtype))
    kept.micro_step("micro_first")
    expected = kept.results()
    for labels in (random_labels(seed), frozenset(LABELS)):
        dropped = Run(family(seed, dtype=dtype, labels=labels))
        dropped.micro_step("micro_first")
        for name, value in dropped.results().items():
            assert torch.equal(value, expected[name]), f"seed {seed}: {name} with {sorted(labels)} dropped"


@pytest.mark.parametrize("seed", range(30))
def test_loss_and_gradients_are_bit_identical_if_values_are_dropped_in_the_first_blocks_only(seed: int) -> None:
    kept = Run(family(seed))
    kept.micro_step("micro_first")
    expected = kept.results()
    for blocks in (1, 2, 3):
        dropped = Run(family(seed, labels=random_labels(seed) | random_labels(seed + 1), blocks=blocks))
        dropped.micro_step("micro_first")
        for name, value in dropped.results().items():
            assert torch.equal(value, expected[name]), f"seed {seed}: {name} with {blocks} blocks"


@pytest.mark.parametrize("seed", range(20))
def test_no_dropped_value_is_live_into_the_backward_pass(seed: int) -> None:
    """Backward and recomputed ops read no original of a dropped value, unless an op that changes a state wrote it."""
    labels = random_labels(seed)
    program = family(seed, labels=labels).trained
    originals = {
        v
        for op in program.ops
        if op.phase == "forward" and op.block >= 0 and not op.changes
        for v in op.outs
        if v.role == "act" and v.label in labels
    }
    for op in program.ops:
        if op.phase != "forward":
            assert not originals & set(op.ins), f"seed {seed}: {op.kind} of block {op.block} reads a dropped value"


@pytest.mark.parametrize("seed", range(20))
def test_no_op_that_changes_a_state_runs_twice(seed: int) -> None:
    def count(labels: frozenset[str]) -> int:
        return sum(bool(op.changes) for op in family(seed, labels=labels).trained.ops)

    assert count(frozenset(LABELS)) == count(frozenset())


@pytest.mark.parametrize(("inputs", "times"), [(frozenset({BLOCK_INPUT}), 1), (frozenset(), 2)])
@pytest.mark.parametrize("seed", range(10))
def test_every_value_is_recomputed_once_and_in_pairs_of_blocks_twice(
    seed: int, inputs: frozenset[str], times: int
) -> None:
    """A common producer of several dropped values is recomputed once, with all its outputs. Where the inputs of blocks
    are dropped too, a block is computed once more for the next one."""
    program = family(seed, labels=frozenset(LABELS) - inputs).trained
    again = [(op.kind, op.ins[1:2], op.block) for op in program.ops if op.phase == "recompute" and op.kind == "linear"]
    forward = [(op.kind, op.ins[1:2], op.block) for op in program.ops if op.phase == "forward" and op.kind == "linear"]
    for key in again:
        assert again.count(key) <= times * forward.count(key), f"seed {seed}: {key}"


def test_without_matching_labels_the_program_is_unchanged() -> None:
    given = family(3)
    again = recompute(given.trained, lambda v: v.label == "no such label", given.source.builder)
    assert [(op.kind, op.ins, op.outs) for op in again.ops] == [(op.kind, op.ins, op.outs) for op in given.trained.ops]


def test_an_op_that_is_always_recomputed_needs_no_label() -> None:
    """Only forward ops read its original output. Its inputs are kept, and it runs again in the backward pass."""
    b = Builder({**VOCABULARY, "rmsnorm": replace(VOCABULARY["rmsnorm"], always_recomputed=True)}, "fp32")
    with b.record("forward"), b.block(0):
        x = b.apply("linear", b.param("x", (T, 4), INIT), b.param("w", (8, 4), INIT))
        y = b.apply("linear", b.apply("rmsnorm", x, b.param("norm", (8,), INIT), eps=1e-5), b.param("v", (4, 8), INIT))
        loss = b.apply("toy_dot", y, b.input("direction", (T, 4), "fp32"))
        forward = b.program("m", (loss,))
    program, _ = differentiate(forward, loss, b, everything, "fp32")
    again = recompute(program, lambda v: False, b)
    verify(again, b.ops)
    assert [op.kind for op in again.ops if op.phase == "recompute"] == ["rmsnorm"]
    original, _ = next(op.outs for op in again.ops if op.kind == "rmsnorm")
    assert {op.phase for op in again.ops if original in op.ins} == {"forward"}


# ------------------------------------------------------------------------------------------- a block of a transformer


def _decoder(n_layers: int, trains: tuple[str, ...] = ()) -> tuple[Program, Builder]:
    b = Builder(VOCABULARY, "bf16")
    with b.record("forward"):
        residual = b.apply("embedding", b.input("tokens", (T,), "int32"), b.param("embedding", (50, C), INIT))
        x = residual
        for i in range(n_layers):
            with b.block(i):
                norm, _, residual = b.emit("add_rmsnorm", x, residual, b.param(f"{i}.norm", (C,), INIT), eps=1e-5)
                qkv = b.apply("linear", norm, b.param(f"{i}.qkv", (3 * C, C), INIT), label="qkv")
                heads = {"n_heads": 4, "n_kv_heads": 4, "head_dim": C // 4, "seq_len": T}
                attention = b.apply("attention", qkv, b.input(f"{i}.cu", (2,), "int32"), **heads)
                x = b.apply("linear", attention, b.param(f"{i}.o", (C, C), INIT), label="attn_out")
                norm, _, residual = b.emit("add_rmsnorm", x, residual, b.param(f"{i}.mlp", (C,), INIT), eps=1e-5)
                gate_up = b.apply("linear", norm, b.param(f"{i}.up", (4 * C, C), INIT), label="gate_up")
                x = b.apply(
                    "linear", b.apply("swiglu", gate_up), b.param(f"{i}.down", (C, 2 * C), INIT), label="mlp_out"
                )
        ins = (b.param("head", (50, C), INIT), b.input("targets", (T,), "int32"), b.input("scale", (), "fp32"))
        loss = b.apply("lm_head_ce", b.apply("add", x, residual), *ins, chunks=4)
        forward = b.program("decoder", (loss,))
    program, _ = differentiate(forward, loss, b, (lambda p: p.name in trains) if trains else everything, "fp32")
    return dead_code(program, VOCABULARY), b


def _lower_bound(program: Program) -> int:
    return plan(program, [0] * len(program.ops))["device"].lower_bound


SETS = {
    "norms": frozenset({"norm", "rstd"}),
    "swiglu": frozenset({"swiglu"}),
    "qkv": frozenset({"qkv"}),
    "attention": frozenset({"qkv", "attention", "lse", "attn_out"}),
    "mlp": frozenset({"gate_up", "swiglu", "mlp_out"}),
    "everything": frozenset({"norm", "rstd", "qkv", "attention", "lse", "attn_out", "gate_up", "swiglu", "mlp_out"}),
}


def labelled(labels: Collection[str]) -> Callable[[Value], bool]:
    return lambda value: value.label in labels


@pytest.mark.parametrize("name", SETS)
def test_dropping_values_of_a_fully_trained_decoder_saves_memory(name: str) -> None:
    """All inputs of the dropped ops are kept for weight gradients anyway, so recomputation needs no extra memory."""
    program, b = _decoder(6)
    shorter = recompute(program, labelled(SETS[name]), b)
    verify(shorter, VOCABULARY)
    assert _lower_bound(shorter) < _lower_bound(program)


def test_dropping_a_value_costs_memory_if_its_inputs_would_not_be_kept() -> None:
    """With frozen weights the wide value is not kept for a gradient. Recomputing the narrow value from it would extend
    its lifetime. Hence the savings of a choice are computed from the plan rather than assumed."""
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"), b.block(0):
        wide = b.apply("linear", b.input("x", (T, 4), "fp32"), b.param("frozen", (4096, 4), INIT), label="wide")
        narrow = b.apply("linear", wide, b.param("also frozen", (4, 4096), INIT), label="narrow")
        y = b.apply("linear", narrow, b.param("trained", (4096, 4), INIT), label="y")
        loss = b.apply("toy_dot", y, b.input("direction", (T, 4096), "fp32"))
        forward = b.program("m", (loss,))
    program, _ = differentiate(forward, loss, b, lambda p: p.name == "trained", "fp32")
    program = dead_code(program, VOCABULARY)

    def kept_over_the_loss(p: Program) -> int:
        last_forward = max(i for i, op in enumerate(p.ops) if op.phase == "forward")
        return live_bytes(lifetimes(p, [0] * len(p.ops))["device"], len(p.ops))[last_forward]

    assert kept_over_the_loss(recompute(program, labelled({"narrow"}), b)) > kept_over_the_loss(program)


def test_a_norm_is_recomputed_from_the_kept_residual_alone() -> None:
    program, b = _decoder(2)
    again = [op for op in recompute(program, labelled(SETS["norms"]), b).ops if op.phase == "recompute"]
    assert {op.kind for op in again} == {"rmsnorm"}
    assert all(v.label in ("residual", "param") for op in again for v in op.ins)


def test_what_is_made_of_a_value_that_a_strategy_moves_is_made_again_from_it() -> None:
    """A copy that has its label, and nothing else: also the value itself is not computed again."""
    b = Builder(VOCABULARY, "fp32")
    with b.record("forward"), b.block(0):
        x = b.apply("linear", b.param("x", (T, 4), INIT), b.param("w", (8, 4), INIT), label="moved")
        copied = b.apply("copy", x, label="moved")
        other = b.apply("copy", x, label="other")
        y = b.apply("linear", b.apply("toy_mul", copied, other), b.param("v", (4, 8), INIT))
        loss = b.apply("toy_dot", y, b.input("direction", (T, 4), "fp32"))
        forward = b.program("m", (loss,))
    program, _ = differentiate(forward, loss, b, everything, "fp32")
    assert drops_anyway(program, b.ops, {"moved"}) and not drops_anyway(program, b.ops)
    again = recompute(program, lambda v: False, b, {"moved"})
    verify(again, b.ops)
    assert [(op.kind, op.ins) for op in again.ops if op.phase == "recompute"] == [("copy", (x,))]
    backward = {v for op in again.ops if op.phase == "backward" for v in op.ins}
    assert copied not in backward and other in backward


def test_a_rule_that_returns_none_for_a_dropped_value_keeps_the_original() -> None:
    b = Builder(
        {**VOCABULARY, "toy_gate": replace(VOCABULARY["toy_gate"], rewrites=Rewrites(rematerialize=_nothing))}, "fp32"
    )
    with b.record("forward"), b.block(0):
        gated = b.apply("toy_gate", b.param("p", (T, 4), INIT))
        loss = b.apply("toy_dot", b.apply("toy_mul", gated, gated), b.input("direction", (T, 4), "fp32"))
        forward = b.program("m", (loss,))
    program, _ = differentiate(forward, loss, b, everything, "fp32")
    again = recompute(program, labelled({"gated", "gate"}), b)
    verify(again, b.ops)
    assert [op.kind for op in again.ops] == [op.kind for op in program.ops]


def _nothing(b: Builder, op: Op, kept: frozenset[Value]) -> tuple[None, None]:
    return None, None
