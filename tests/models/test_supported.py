"""Every family with every way to train it, once each on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import log
from typing import Any

import pytest
from models.harness import tiny_config
from models.supported import FAMILIES, RUNS, Family, Run
from models.test_parity import VARIANTS
from recipe_model import LENGTH, ROWS, Model, differing
from sharding.ranks import assert_equal, trained
from sharding.test_combinations import EVERY, settings

from surogate_core.program.shards import Sharding
from surogate_loss_preference.losses import LOSSES

VOCABULARY = 96
FULL = {"level": "states", "optimizer": "adamw", "recipe": "bf16", "base": "trained", "recompute": "nothing"}
FULL |= {"offload": "nothing"}
QUICK = ("gemma3_text", "olmo3", "phi3", "qwen3_moe")
"""Families whose blocks differ most. Runs of the others are slow tests."""
ERRORS = {"fp8 tiles": 0.1, "nf4": 0.3, "fp4": 0.3, "fp8": 0.1, "nvfp4": 0.3}
DPO = next(loss for loss in LOSSES if loss.name == "dpo")

every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(f, id=f.variant, marks=() if f.variant in QUICK else pytest.mark.slow) for f in FAMILIES],
)


def config_of(variant: str, layers: int = 2) -> dict[str, Any]:
    """A config of matrices that every format divides, with weights so large that each changes the loss."""
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    config = tiny_config(**VARIANTS[variant]) | sizes | {"vocab_size": VOCABULARY, "initializer_range": 0.2}
    for key in {"layer_types", "no_rope_layers"} & config.keys():
        config[key] = config[key][:layers]
    widths = {"moe_intermediate_size", "shared_expert_intermediate_size"} & config.keys()
    latent = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
    return config | dict.fromkeys(widths, 64) | {key: size for key, size in latent.items() if config.get(key)}


def made(config: dict[str, Any], axes: dict[str, str]) -> Model:
    given = settings(FULL | axes)
    request = given.pop("request")
    if axes.get("offload") == "master":
        kept = replace(request, master_dtype="fp32")
        given["precision"] = given["recipe"].precision(kept, given["recipe_options"])
    if axes.get("base") == "lora":
        given |= {"loss": DPO, "loss_options": DPO.options()}
    return Model(config, recipe=given.pop("recipe"), options=given.pop("recipe_options"), ops=EVERY, **given)


@cache
def loss_in_fp32(variant: str, layers: int) -> float:
    return loss_of(made(config_of(variant, layers), {"recipe": "fp32"}))


def loss_of(model: Model) -> float:
    model.micro_step(True, 0)
    return float(model.view(model.assembly.loss))


@every_family
@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(run.axes.values()))
def test_every_family_trains_in_every_way(family: Family, run: Run) -> None:
    layers = 3 if run.axes.get("offload") == "residual" else 2
    model = made(config_of(family.variant, layers), dict(run.axes))
    groups = model.assembly.batch.groups
    if groups is not None:  # a pair of documents; at the start its policy is the reference
        assert model.assembly.batch.group_scale is not None and ROWS == 2
        model.view(groups).zero_()[0] = model.view(groups).new_tensor([[0, LENGTH], [LENGTH, 2 * LENGTH]])
        model.view(model.assembly.batch.group_scale).fill_(1.0)
        began = loss_of(model)
        assert began == pytest.approx(log(2), rel=1e-6)
    else:
        began, exact = loss_of(model), loss_in_fp32(family.variant, layers)
        error = max(ERRORS.get(run.axes.get(axis, ""), 0.05) for axis in ("recipe", "base"))
        assert abs(began - exact) <= error * abs(exact - log(VOCABULARY))  # ln V is the loss of no knowledge
    before = model.named("param")
    model.update(lr=1e-3)
    assert loss_of(model) < began
    changed = set(differing(before, model.named("param")))
    never = {m.param for m in model.assembly.weights if not m.trained}
    trains = {name for name in before if "base" not in run.axes or ".lora_B" in name} - never
    with_masters = run.axes.get("offload") == "master"  # 0.001 of a norm of 1 is less than bf16 has
    assert changed - trains == set() and all("norm" in name and with_masters for name in trains - changed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.variant)
def test_weights_that_two_ranks_divide_train_as_whole_ones(family: Family) -> None:
    divided, whole = (
        trained(config_of(family.variant), 2, sharding, steps=1, micro_steps=1, ops=EVERY, max_grad_norm=1.0)
        for sharding in (Sharding(parts=2, states=True, gradients=True, weights=True), Sharding(parts=2))
    )
    assert_equal(divided, whole)
