"""The LM head by FP8 products on the CPU: what it computes, its place in programs, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_model import CONFIG, LENGTH, ROWS, VOCABULARY, Model, differing, kinds, lora_rank_8

from surogate_core.api import ConfigError, Op, Target, Value
from surogate_core.reference import ops as standard
from surogate_core.testing.devices import DEVICES, device
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_loss_tokens.loss import TOKENS
from surogate_recipes_fp8.head_reference import fp8_lm_head_ce, fp8_lm_head_ce_grads
from surogate_recipes_fp8.kernels.head import KERNELS
from surogate_recipes_fp8.reference import fp8_quantize

HEAD = {"fp8_lm_head": True}
TIED = CONFIG | {"tie_word_embeddings": True}


def head_of(model: Model, program: str = "micro_first") -> Op:
    (op,) = [op for op in model.assembly.programs[program].ops if op.kind.startswith("fp8_lm_head")]
    return op


# ------------------------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_head_computes_what_the_standard_one_does(softcap: float) -> None:
    """Of rounded operands. A code of the gradient is off by up to an eighth, sums of them by 6 %."""
    torch.manual_seed(3)
    x, w = torch.randn(64, 32).bfloat16(), (torch.randn(208, 32) / 4).bfloat16()
    targets = torch.randint(-60, 208, (64,), dtype=torch.int32)
    codes, w_scale = fp8_quantize(w, dtype="e4m3", scaling="current")
    rounded_w = (codes.float() * w_scale[0]).bfloat16()
    labelled = torch.where((targets >= 0)[:, None], x, 0)
    x_codes, x_scale = fp8_quantize(labelled, dtype="e4m3", scaling="current")
    rounded_x = (x_codes.float() * x_scale[0]).bfloat16()
    attrs: dict[str, Any] = {"chunks": 1, "softcap": softcap}
    for scale in (torch.tensor(0.25), torch.tensor(1e-6)):
        ours = fp8_lm_head_ce_grads(x, codes, targets, scale, w_scale, wrt=(0, 1), **attrs)
        theirs = standard.lm_head_ce_grads(rounded_x, rounded_w, targets, scale, wrt=(0, 1), **attrs)
        alone = fp8_lm_head_ce(x, codes, targets, scale, w_scale, **attrs)
        assert float(ours[0]) == pytest.approx(float(alone), rel=1e-6)
        errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(ours, theirs, strict=True)]
        assert errors[0] < 1e-3 and all(1e-3 < error < 0.06 for error in errors[1:]), errors
        assert not ours[1][targets < 0].any()


def test_an_outlier_without_a_label_does_not_take_part_in_the_scale() -> None:
    torch.manual_seed(3)
    x, w = torch.randn(32, 16).bfloat16(), torch.randn(64, 16).bfloat16()
    codes, w_scale = fp8_quantize(w, dtype="e4m3", scaling="current")
    targets = torch.arange(32, dtype=torch.int32)
    targets[5] = -100
    losses = []
    for outlier in (1.0, 1e6):
        x[5] = outlier
        losses.append(float(fp8_lm_head_ce(x, codes, targets, torch.tensor(1.0), w_scale, chunks=2)))
    assert losses[0] == losses[1]


def test_without_labels_everything_is_zero() -> None:
    x, targets = torch.randn(32, 16).bfloat16(), torch.full((32,), -100, dtype=torch.int32)
    codes, w_scale = fp8_quantize(torch.randn(64, 16), dtype="e4m3", scaling="current")
    results = fp8_lm_head_ce_grads(x, codes, targets, torch.tensor(1.0), w_scale, chunks=2, wrt=(0, 1))
    assert not any(result.any() for result in results)


# ------------------------------------------------------------------------------------------------------------- lowering


def test_the_head_of_every_program_is_lowered_and_only_if_it_is_asked_for() -> None:
    model, plain = Model(options=HEAD, numerics=True), Model()
    for name in ("micro_first", "micro_next", "calibrate_first", "calibrate_next", "report_first"):
        found = kinds(model.assembly.programs[name])
        assert found["fp8_lm_head_ce_grads"] == 1 and found["lm_head_ce_grads"] == 0
    assert kinds(model.assembly.programs["evaluate"])["fp8_lm_head_ce"] == 1
    assert not [k for p in plain.assembly.programs.values() for k in kinds(p) if k.startswith("fp8_lm_head")]
    assert head_of(model).outs[-1].role == "grad" and head_of(model, "micro_next").accumulate == {0, 2}
    assert head_of(model).attrs["fast"] and not head_of(model).attrs["fast_dx"]


def test_the_head_has_no_state_but_the_copies_of_its_weight() -> None:
    """So a run is resumed with the key set or not."""
    model, plain = Model(options=HEAD), Model()
    more = {v.name for v in model.assembly.declared} - {v.name for v in plain.assembly.declared}
    assert more == {"fp8.lm_head", "fp8.lm_head.scale"}
    assert all(v.derived for v in model.assembly.declared if v.name in more)


def test_the_weight_is_quantized_after_every_update_by_the_magnitude_that_the_optimizer_found() -> None:
    for config, name in ((CONFIG, "lm_head"), (TIED, "embedding")):
        model = Model(config, options=HEAD)
        assert "fp8_amax" not in kinds(model.assembly.programs["update"])
        model.step()
        weight = next(v for v in model.assembly.params.values() if v.name == name)
        codes, scale = fp8_quantize(model.view(weight), dtype="e4m3", scaling="current")
        assert torch.equal(model.state(f"fp8.{name}").view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(model.state(f"fp8.{name}.scale"), scale)


def test_a_frozen_head_is_kept_in_fp8_only_and_its_transposed_copy_with_it() -> None:
    model = Model(options=HEAD, **lora_rank_8())
    names = {v.name for v in model.assembly.allocated}
    assert {"fp8.lm_head", "fp8.lm_head.transposed", "fp8.lm_head.scale"} <= names and "lm_head" not in names
    assert "derive.outside" in {part.program.name for part in model.assembly.staging}
    op = head_of(model)
    assert op.attrs["wrt"] == (0,) and op.ins[5].name == "fp8.lm_head.transposed"
    assert model.step() == pytest.approx(Model(**lora_rank_8()).step(), rel=5e-3)


def test_an_embedding_that_is_the_head_stays_beside_its_copies() -> None:
    model = Model(TIED, options=HEAD, **lora_rank_8())
    assert {"fp8.embedding", "fp8.embedding.transposed", "embedding"} <= {v.name for v in model.assembly.allocated}


def test_a_head_that_an_adapter_trains_is_quantized_after_every_update() -> None:
    saving = [(LORA, LoraOptions.model_validate({"lora_rank": 8, "lora_modules_to_save": ["lm_head"]}))]
    model = Model(options=HEAD, adapters=saving)
    assert head_of(model).attrs["wrt"] == (0, 1)
    before = model.state("fp8.lm_head").clone()
    model.step()
    assert not torch.equal(before.view(torch.uint8), model.state("fp8.lm_head").view(torch.uint8))


def test_cards_that_multiply_any_layout_need_no_transposed_weight_and_compute_the_same() -> None:
    hopper, blackwell = Model(options=HEAD), Model(options=HEAD, target=Target(device("b200")))
    assert len(head_of(hopper).ins) == 6 and len(head_of(blackwell).ins) == 5
    for model in (hopper, blackwell):
        model.step()
        model.step()
    assert differing(hopper.named("param"), blackwell.named("param")) == []


@pytest.mark.parametrize("settings", [{}, {"request": {"param_grad_dtype": "bf16", "optimizer_state_dtype": "bf16"}}])
def test_losses_and_gradients_are_close_to_those_of_a_head_in_bf16(settings: dict[str, Any]) -> None:
    ours, theirs = Model(options=HEAD, **settings), Model(**settings)
    for model in (ours, theirs):
        model.micro_step(True, 0)
    assert float(ours.view(ours.assembly.loss)) == pytest.approx(float(theirs.view(theirs.assembly.loss)), rel=5e-3)
    left, right = ours.gradients(), theirs.gradients()
    errors = {name: float((left[name] - g).norm() / g.norm()) for name, g in right.items() if g.norm() > 0}
    assert 0 < sum(errors.values()) / len(errors) < 0.15, errors
    assert torch.isfinite(torch.tensor([ours.step() for _ in range(3)])).all()


def test_an_activation_that_is_not_finite_skips_the_step() -> None:
    model = Model(options=HEAD)
    model.step()
    model.view(model.assembly.params["norm"]).fill_(torch.inf)
    before = model.named("param")
    assert torch.isnan(torch.tensor(model.step()))
    assert differing(before, model.named("param")) == []


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (CONFIG | {"vocab_size": 72}, {}, r"16 rows in lm_head, the vocabulary, got 72\. Remove the key"),
        (CONFIG, {"lmhead_chunks": 8}, r"16 tokens in each of 8 chunks of the LM head, got 8\. Change lmhead_chunks"),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_the_key(config: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^fp8_lm_head: true: .*{message}"):
        Model(config, options=HEAD, **changes)


def test_heads_of_other_losses_are_refused_by_their_op() -> None:
    with pytest.raises(ConfigError, match="fp8_lm_head: true: the head of this run's loss is lm_head_tokens"):
        Model(options=HEAD, loss=TOKENS, loss_options=TOKENS.options())


# -------------------------------------------------------------------------------------------------------------- kernels


def op_of(wrt: tuple[int, ...], dw: str = "fp32", *, transposed: bool = True, tokens: int = 64, chunks: int = 4) -> Op:
    def value(name: str, dtype: str, *shape: int) -> Value:
        return Value(name=name, shape=shape, dtype=dtype, role="act")

    ins = [value("x", "bf16", tokens, 32), value("w", "e4m3", 96, 32), value("targets", "int32", tokens)]
    ins += [value("loss_scale", "fp32"), value("w_scale", "fp32", 2)]
    ins += [value("w_t", "e4m3", 32, 96)] if wrt and transposed else []
    grads = (value("dx", "bf16", tokens, 32), value("dw", dw, 96, 32))
    attrs: dict[str, Any] = {"chunks": chunks} | ({"wrt": wrt} if wrt else {})
    kind = "fp8_lm_head_ce_grads" if wrt else "fp8_lm_head_ce"
    return Op(kind, tuple(ins), (value("loss", "fp32"), *(grads[i] for i in wrt)), attrs)


def reasons(op: Op, card: str = "h200") -> list[str]:
    dtypes = tuple(v.dtype for v in (*op.ins, *op.outs))
    found = [k for k in KERNELS if k.op == op.kind and k.dtypes == dtypes]
    return [k.supports(op, Target(DEVICES[card])).reason for k in found]


@pytest.mark.parametrize("wrt", [(), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize("dw", ["fp32", "bf16"])
def test_exactly_one_kernel_serves_each_set_of_gradients(wrt: tuple[int, ...], dw: str) -> None:
    assert reasons(op_of(wrt, dw)) == [""]
    assert reasons(op_of(wrt, dw, transposed=False), "b200") == [""]


def test_what_no_kernel_serves_is_named() -> None:
    assert "summed dimension contiguous" in reasons(op_of((0,), transposed=False))[0]
    assert "as rows of a chunk, got 8" in reasons(op_of((0,), chunks=8))[0]


def test_transposed_codes_take_workspace_where_the_weight_is_trained() -> None:
    """Those of the gradient, and of x. A bf16 dw is summed in fp32."""

    def needed(op: Op) -> int:
        dtypes = tuple(v.dtype for v in (*op.ins, *op.outs))
        (kernel,) = [k for k in KERNELS if k.op == op.kind and k.dtypes == dtypes]
        return kernel.workspace(op, Target(DEVICES["h200"]))

    dx, dw, rounded = (needed(op) for op in (op_of((0,)), op_of((0, 1)), op_of((0, 1), "bf16")))
    assert (dw - dx, rounded - dw) == (16 * (96 + 32), 4 * 96 * 32)


def test_plans_price_three_products_at_the_rate_of_fp8() -> None:
    model = Model(options=HEAD)
    op, definition = head_of(model), model.inputs.ops["fp8_lm_head_ce_grads"]
    assert definition.flops(op) == 6 * ROWS * LENGTH * CONFIG["hidden_size"] * VOCABULARY
    assert definition.math is not None and definition.math(op) == "fp8"
    assert {k.arithmetic for k in KERNELS} == {None}
