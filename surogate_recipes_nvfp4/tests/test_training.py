"""Training under the nvfp4 recipe on the CPU: the same bits where they should be, what is learned, skipped steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from models.harness import OPS
from nvfp4_model import BIASED, CONFIG, LAYERS, PRODUCTS, model, quantizers, trained
from recipe_model import Model, differing, lora_rank_8

from surogate_core.api import Target
from surogate_core.assembly.recomputed import PARTS, Recomputation
from surogate_core.testing.devices import device
from surogate_optim_adamw_8bit.optimizer import ADAMW_8BIT, ADAMW_8BIT_OP, AdamW8bitOptions
from surogate_optim_normuon.optimizer import NORMUON, NORMUON_OP, NorMuonOptions
from surogate_qlora_fp4.format import FP4
from surogate_qlora_fp4.reference import fp4_block_dequantize, fp4_block_quantize
from surogate_qlora_fp8.format import FP8
from surogate_qlora_nf4.format import NF4
from surogate_recipes_nvfp4.reference import nvfp4_quantize, values

# ----------------------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize("lora", [False, True])
def test_quantized_weights_are_made_again_by_a_resumed_run(lora: bool) -> None:
    settings = lora_rank_8() if lora else {}
    straight, resumed = trained(**settings), model(**settings)
    written = {v.name: v for v in straight.assembly.allocated}
    for value in resumed.assembly.allocated:
        if value.role in ("param", "state") and not value.derived:
            resumed.view(value).copy_(straight.view(written[value.name]))
    assert all(v.derived for v in resumed.assembly.allocated if v.name.startswith("nvfp4."))
    resumed.executor.run("derive")
    resumed.steps = straight.steps
    assert straight.step() == resumed.step()
    assert differing(straight.named("param", "state"), resumed.named("param", "state")) == []


def test_each_pass_makes_the_form_that_it_reads() -> None:
    """The norm is dropped after the forward pass, which then has no use for the form of its transpose."""
    program = model(recompute=frozenset({"rmsnorm"})).assembly.programs["micro_first"]
    made = {
        op.phase: (op.attrs["rows"], op.attrs["columns"])
        for op in program.ops
        if op.kind == "nvfp4_quantize" and op.ins[0].label == "norm"
    }
    assert made == {"forward": (True, False), "recompute": (False, True)}


@pytest.mark.parametrize(
    ("target", "lora"),
    [pytest.param(None, False, marks=pytest.mark.slow), (None, True), ("b200", False), ("b200", True)],
)
def test_recomputation_changes_no_bit(target: str | None, lora: bool) -> None:
    """Of each part, of all, and of more of them in the first of three blocks than in the others."""
    settings = (lora_rank_8() if lora else {}) | {"target": Target(device(target)) if target else None}
    plain = trained(**settings)
    expected = plain.named("param", "state")
    chosen = Recomputation(frozenset({"rmsnorm", "swiglu"}), frozenset({"block"}), 1)
    every: list[dict[str, Any]] = [{"recompute": frozenset(PARTS)}, {"recompute_chosen": chosen}]
    if target is None:
        every += [{"recompute": frozenset({part})} for part in PARTS]
    for given in every:
        saving = trained(**settings, **given)
        assert differing(expected, saving.named("param", "state")) == [], given
    arenas = [
        run.assembly.memory.arenas["micro_first"].lower_bound for run in (plain, trained(1, **settings, **every[0]))
    ]
    assert arenas[1] < arenas[0]


def test_a_step_has_the_gradients_of_its_micro_steps() -> None:
    run, alone = model(), model()
    total = {name: torch.zeros_like(grad) for name, grad in alone.gradients().items()}
    for index in range(2):
        run.micro_step(index == 0, index)
        alone.micro_step(True, index)
        for name, grad in alone.gradients().items():
            total[name] += grad
    assert all(torch.equal(grad, total[name]) for name, grad in run.gradients().items())


def test_the_same_documents_are_rounded_by_other_numbers_in_another_micro_step() -> None:
    run, nearest = model(), model(options={"no_fp4_stochastic_rounding": True})

    def gradients(of: Model, index: int) -> dict[str, torch.Tensor]:
        of.micro_step(True, 0, index=index)
        return of.gradients()

    first, second, again = gradients(run, 0), gradients(run, 1), gradients(run, 0)
    matrices = [name for name, grad in first.items() if grad.dim() == 2 and name.startswith("layers")]
    assert len(matrices) == PRODUCTS * LAYERS
    assert all(not torch.equal(first[name], second[name]) for name in matrices)
    assert all(torch.equal(first[name], again[name]) for name in first)
    left, right = gradients(nearest, 0), gradients(nearest, 1)
    assert all(torch.equal(left[name], right[name]) for name in left)


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("lora", [False, True])
def test_loss_and_gradients_are_close_to_those_of_bf16(config: Mapping[str, Any], lora: bool) -> None:
    """A product is 14 to 18 % off. Here errors of all products of three blocks add up."""
    settings = lora_rank_8() if lora else {}
    ours, theirs = model(config, **settings), Model(config, **settings)
    for run in (ours, theirs):
        run.micro_step(True, 0)
    assert float(ours.view(ours.assembly.loss)) == pytest.approx(float(theirs.view(theirs.assembly.loss)), rel=2e-2)
    left, right = ours.gradients(), theirs.gradients()
    errors = {name: float((left[name] - g).norm() / g.norm()) for name, g in right.items() if g.norm() > 0}
    assert left.keys() == right.keys() and max(errors.values()) < 0.9
    assert sum(errors.values()) / len(errors) < 0.65


def test_a_run_learns_as_in_bf16() -> None:
    """Four micro-batches, over and over."""

    def losses(run: Model) -> list[float]:
        found = []
        for step in range(25):
            for index in range(2):
                run.micro_step(index == 0, 2 * (step % 2) + index, index=2 * step + index)
            found.append(run.update() / 2)
        return found

    ours, theirs = losses(model(skip=True)), losses(Model(CONFIG))
    start, end = sum(theirs[:2]) / 2, sum(theirs[-4:]) / 4
    assert end < 0.5 * start
    assert sum(ours[-4:]) / 4 - end < 0.03 * (start - end)


STORED = {"nf4": NF4, "fp8": FP8, "fp4": FP4}


@pytest.mark.parametrize("name", STORED)
def test_an_adapter_trains_on_a_frozen_base_in_every_format(name: str) -> None:
    config = CONFIG | {"intermediate_size": 128}
    options = {"fp8": {"qlora_block_size": 64}}.get(name, {})
    format = STORED[name]
    settings = lora_rank_8() | {"weight_format": (format, format.options.model_validate(options))}
    ours, theirs, saving = (
        model(config, **settings),
        Model(config, **settings),
        model(config, recompute=frozenset({"block"}), **settings),
    )
    found, expected, again = ([run.step(lr=2e-2) for _ in range(3)] for run in (ours, theirs, saving))
    assert found == pytest.approx(expected, rel=3e-2) and found == again
    assert not [v for v in ours.assembly.allocated if v.name.startswith("nvfp4.") and v.name.endswith(".codes")]


@pytest.mark.parametrize(("square", "error"), [(False, 0.0871), (True, 0.138)])
def test_weights_that_are_stored_in_nvfp4_lose_nothing_more_in_blocks_of_16(square: bool, error: float) -> None:
    """With 4 or 6, and in rows. Squares of 16 x 16 round them once more."""
    weight = (0.02 * torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))).bfloat16()
    stored = fp4_block_quantize(weight, rows=(256,), four_over_six=True)
    back = fp4_block_dequantize(*stored, rows=(256,), dtype="bf16")
    codes, scales, amax = nvfp4_quantize(back, rows=True, columns=False, square=square, four_over_six=True)
    again = values(codes, scales) * amax[0] / (6 * amax[1])
    assert float((again - weight.float()).norm() / weight.float().norm()) == pytest.approx(error, rel=0.01)
    assert torch.equal(again.bfloat16(), back) == (not square)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": NORMUON, "optimizer_options": NorMuonOptions(), "ops": OPS | {NORMUON_OP.kind: NORMUON_OP}},
        {
            "optimizer": ADAMW_8BIT,
            "optimizer_options": AdamW8bitOptions(),
            "ops": OPS | {ADAMW_8BIT_OP.kind: ADAMW_8BIT_OP},
        },
        {"request": {"param_grad_dtype": "bf16", "optimizer_state_dtype": "bf16"}},
        {"request": {"master_dtype": "fp32"}},
    ],
    ids=["normuon", "adamw_8bit", "bf16 gradients", "fp32 masters"],
)
def test_every_optimizer_trains(settings: dict[str, Any]) -> None:
    run = model(**settings)
    before = run.named("param")
    assert torch.isfinite(torch.tensor([run.step(lr=1e-3) for _ in range(2)])).all()
    assert {name for name in differing(before, run.named("param")) if name.endswith("mlp.down")}


# ------------------------------------------------------------------------------------------------------- no finiteness


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_activation_that_is_not_finite_skips_the_step(bad: float) -> None:
    """E2M1 has no such numbers: the magnitude of the tensor carries them into the product."""
    run = trained(1)
    norm = run.view(run.assembly.params["layers.1.attn.norm"])
    norm[3] = bad
    before = run.named("param")
    assert not torch.isfinite(torch.tensor(run.evaluate()))
    run.step()
    assert not run.view(run.assembly.grad_norm).isfinite()
    assert differing(before, run.named("param")) == []


@pytest.mark.parametrize("which", ["x", "dy"])
def test_infinity_in_any_operand_skips_the_step(which: str) -> None:
    """One element is set before the operand is quantized, and nothing else reads it."""
    run = trained(1)
    before = run.named("param")
    program = run.assembly.programs["micro_first"]
    (op, *_) = [op for op in quantizers(program, which) if op.block == 1]
    at = program.ops.index(op)
    run.micro_step(
        True, 7, after=lambda p, i: i == at - 1 and run.buffers.view(op.ins[0], p.name).view(-1)[5].fill_(torch.inf)
    )
    run.update()
    assert not run.view(run.assembly.grad_norm).isfinite()
    assert differing(before, run.named("param")) == []
