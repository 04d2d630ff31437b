"""Several losses: each is seeded, gradients are those of their sum, and every op of a known head keeps its kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import harness
from models.harness import tiny_config
from random_programs import VOCABULARY
from small_programs import INIT, draw, everything, train
from torch import Tensor

from surogate_core.api import Head, OpDef, OutSpec, Value
from surogate_core.assembly.assemble import assemble
from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_core.program.differentiate import differentiate
from surogate_core.reference import ops as reference
from surogate_models.qwen3 import QWEN3

T, C, V = 6, 4, 5
CONTENTS = {
    "targets": torch.tensor([2, -100, 1, 1, 0, 4]),
    "others": torch.tensor([0, 3, -100, 1, 4, -100]),
    "scale": torch.tensor(0.5),
    "weak": torch.tensor(0.125),
}


def z_loss(x: Tensor, *, weight: float) -> Tensor:
    return weight * x.logsumexp(-1).square().sum()


Z_LOSS = OpDef(
    kind="acme_z",
    infer=lambda ins, attrs: [OutSpec("z", (), ins[0].dtype)],
    attrs={"weight": float},
    reference=f"{__name__}:z_loss",
)
OPS = {**VOCABULARY, "acme_z": Z_LOSS}


def three(b: Builder) -> tuple[Value, ...]:
    """Two heads on two values, one with a weight of its own, and an auxiliary loss without a rule."""
    x = b.param("x", (T, C), INIT)
    hidden = b.apply("linear", x, b.param("w", (C, C), INIT))
    names = ("targets", "scale"), ("others", "weak")
    ins = [(b.input(t, (T,), "int32"), b.input(s, (), "fp32")) for t, s in names]
    heads = [b.param(name, (V, C), INIT) for name in ("head", "second")]
    return (
        b.apply("lm_head_ce", hidden, heads[0], *ins[0], chunks=2),
        b.apply("lm_head_ce", x, heads[1], *ins[1], chunks=2),
        b.apply("acme_z", hidden, weight=0.25),
    )


def test_gradients_are_those_of_the_sum_of_the_losses() -> None:
    found = train(three, ops=OPS, contents=CONTENTS, grad_dtype="fp64").run()
    names = {"x": (T, C), "w": (C, C), "head": (V, C), "second": (V, C)}
    p = {name: draw(Value(name, shape, "fp64", "param")).requires_grad_() for name, shape in names.items()}
    hidden = p["x"] @ p["w"].T
    total = reference.lm_head_ce(hidden, p["head"], CONTENTS["targets"], CONTENTS["scale"], chunks=1)
    total = total + reference.lm_head_ce(p["x"], p["second"], CONTENTS["others"], CONTENTS["weak"], chunks=1)
    (total + z_loss(hidden, weight=0.25)).backward()
    for name, value in p.items():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-12, atol=1e-13)


def test_each_head_computes_its_own_gradients() -> None:
    b = Builder(OPS, "fp32")
    with b.record("forward"):
        losses = three(b)
        program, _ = differentiate(b.program("forward", losses), losses, b, everything, "fp32")
    kinds = [op.kind for op in program.ops]
    assert kinds.count("lm_head_ce_grads") == 2 and "lm_head_ce" not in kinds
    assert [op.attrs["of"] for op in program.ops if op.kind == "reference_vjp"] == ["acme_z"]


def test_a_head_whose_loss_is_read_by_another_loss_is_refused() -> None:
    b = Builder(OPS, "fp32")
    with b.record("forward"):
        first, second, _ = three(b)
        total = b.apply("add", first, second)
        with pytest.raises(ProgramError, match=r"lm_head_ce_grads .* is read on the way to another loss"):
            differentiate(b.program("forward", (first, total)), (first, total), b, everything, "fp32")


def test_a_run_reports_the_first_loss_and_evaluates_it_alone() -> None:
    """A second head on the embeddings, as for distillation: no op of it has only a reference."""

    def build(b: Builder, dims: Any, batch: Any) -> Head:
        head = QWEN3.build(b, dims, batch)
        named = {v.name: v for v in b.declared}
        x = b.apply("embedding", batch.tokens, named["embedding"])
        second = b.apply("lm_head_ce", x, named["embedding"], batch.targets, batch.loss_scale, chunks=1)
        return replace(head, losses=(second,))

    config = tiny_config(vocab_size=61, num_hidden_layers=2)
    assembly = assemble(harness.plan_inputs(config, model=replace(QWEN3, build=build)))
    programs = assembly.programs
    heads = {name: [op for op in p.ops if op.kind.startswith("lm_head_ce")] for name, p in programs.items()}
    assert [len(heads[name]) for name in ("micro_first", "micro_next", "evaluate")] == [2, 2, 1]
    assert [assembly.loss in op.outs for op in heads["micro_next"]] == [False, True]
    assert not any(op.kind == "reference_vjp" for p in programs.values() for op in p.ops)
