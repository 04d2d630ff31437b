"""A recipe of a third party, neither FP8 with scales of tensors nor NVFP4: `lower_products` serves its format too."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, make_workplace, records
from made_up_plugins import installing
from models.harness import OPS, tiny_config
from mxfp8_recipe import MXFP8, SkippedBlocks, mxfp8_linear, mxfp8_quantize, values
from mxfp8_recipe import OPS as MXFP8_OPS
from recipe_model import LENGTH, Model, differing, kinds, lora_rank_8

from surogate import run
from surogate_core.assembly.recomputed import PARTS
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import cpu, device
from surogate_core.testing.ops import check_op

LAYERS, PRODUCTS = 3, 4
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": LAYERS, "intermediate_size": 96}
CONFIG = tiny_config(**SIZES)
BIASED = tiny_config(model_type="qwen2", **SIZES)
KNOWN = OPS | {op.kind: op for op in MXFP8_OPS}


def model(config: Mapping[str, Any] = CONFIG, **changes: Any) -> Model:
    options = SkippedBlocks.model_validate(changes.pop("options", {}))
    return Model(config, recipe=MXFP8, options=options, ops=KNOWN, **changes)


def test_a_block_has_the_smallest_power_of_two_that_clips_nothing() -> None:
    x = (
        torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 64)[:, None]
    ).bfloat16()
    x[3, :32] = 0
    x[4, 32] = 448 * 2**5
    q, scales, _, _ = check_op(MXFP8_OPS[0], x, rows=True, columns=True)
    amax, powers = x.float().view(64, -1, 32).abs().amax(dim=-1), scales.float()
    assert ((amax <= 448 * powers) & ((amax > 224 * powers) | (amax == 0))).all()
    assert values(q, scales)[4, 32] == 448 * 2**5
    error = (values(q, scales) - x.float()).abs().view(64, -1, 32)
    assert (error <= amax[..., None] / 16).all()
    assert not torch.isfinite(values(*mxfp8_quantize(x / 0, rows=True, columns=False))).any()


def test_a_product_of_gaussian_matrices_is_within_the_error_that_the_recipe_names() -> None:
    a, b = (torch.randn(128, 256, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (1, 2))
    forms = [mxfp8_quantize(x, rows=True, columns=False) for x in (a, b)]
    product, exact = mxfp8_linear(*forms[0], *forms[1], dtype="fp32"), a.float() @ b.float().T
    error = float((product - exact).norm() / exact.norm())
    assert 0.03 < error < 0.04 == MXFP8.product_error(None, None)


@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("lora", [False, True])
def test_every_product_of_a_block_is_lowered_and_the_model_trains(config: Mapping[str, Any], lora: bool) -> None:
    settings = lora_rank_8() if lora else {}
    ours, theirs = model(config, **settings), Model(config, **settings)
    found = kinds(ours.assembly.programs["micro_next"])
    assert found["mxfp8_linear"] == PRODUCTS * LAYERS * (2 if lora else 3) - lora
    assert lora or not {"linear", "linear_dgrad", "linear_wgrad"} & found.keys()
    for of in (ours, theirs):
        of.micro_step(True, 0)
    left, right = ours.gradients(), theirs.gradients()
    errors = [float((left[name] - grad).norm() / grad.norm()) for name, grad in right.items() if grad.norm() > 0]
    assert 0.01 < sum(errors) / len(errors) < 0.2
    for of in (ours, theirs):
        of.update()
    assert ours.step() == pytest.approx(theirs.step(), rel=1e-2)


@pytest.mark.parametrize("lora", [False, True])
def test_recomputation_changes_no_bit(lora: bool) -> None:
    settings = lora_rank_8() if lora else {}
    runs = [model(**settings, recompute=parts) for parts in (frozenset(), frozenset(PARTS))]
    for of in runs:
        of.step(), of.step()
    assert differing(runs[0].named("param", "state"), runs[1].named("param", "state")) == []


def test_weights_are_quantized_once_a_step_and_frozen_ones_once() -> None:
    trained, frozen = model(), model(**lora_rank_8())
    assert kinds(trained.assembly.only("update"))["mxfp8_quantize"] == PRODUCTS * LAYERS
    assert kinds(frozen.assembly.only("update"))["mxfp8_quantize"] == 0
    staged = [kinds(part.program)["mxfp8_quantize"] for part in frozen.assembly.staging]
    assert staged == [PRODUCTS] * LAYERS
    trained.step()
    name = "layers.1.mlp.down"
    (q, scales) = mxfp8_quantize(trained.view(trained.assembly.params[name]), rows=True, columns=False)
    found = trained.state(f"mxfp8.{name}.rows"), trained.state(f"mxfp8.{name}.rows.scales")
    assert torch.equal(values(*found), values(q, scales))


def test_skipped_blocks_and_sizes_are_those_of_core() -> None:
    program = model(options={"skip_quant_first_layers": 1}).assembly.programs["micro_first"]
    assert {op.block for op in program.ops if op.kind == "mxfp8_linear"} == {1, 2}
    with pytest.raises(ConfigError, match="MXFP8 products need a multiple of 32 tokens in a micro-step, got 33"):
        model(seq_len=LENGTH + 1, batch_size=1)
    with pytest.raises(ConfigError, match="leave none of the 3 blocks to quantize"):
        model(options={"skip_quant_last_layers": 3})


def test_a_config_selects_the_recipe_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for install in installing(tmp_path, monkeypatch):
        install("acme-mxfp8", "0.1.0", "mxfp8", (Path(__file__).parents[1] / "mxfp8_recipe.py").read_text())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        here: Workplace = make_workplace(tmp_path / "work")
        keys = {"recipe": "mxfp8", "model_dtype": None, "skip_quant_last_layers": 1, "max_steps": 3}
        loaded = run.load(here.write(**keys))
        assert "mxfp8_linear" in kinds(run.plan(loaded, cpu()).assembly.programs["micro_first"])
        with pytest.raises(ConfigError, match="recipe: mxfp8 cannot run on NVIDIA H200: MXFP8 products need SM100"):
            run.plan(loaded, device("h200"))
        run.train(loaded, notice=lambda line: None)
        losses = [record["loss"] for record in records(here.out, "step")]
        assert len(losses) == 3 and losses[-1] < losses[0]
    assert "acme_mxfp8_mxfp8" not in sys.modules
