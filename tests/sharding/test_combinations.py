"""Divided states, gradients and weights with every optimizer, recipe, format, adapter and way to offload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from covering import drawn
from models.harness import OPS, tiny_config
from sharding.ranks import assert_equal, trained

from surogate_core.api import PrecisionRequest
from surogate_core.errors import ConfigError
from surogate_core.program.shards import Sharding, is_divisible
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_offload_residual.plugin import surogate_offload_strategies as residual
from surogate_offload_states.plugin import surogate_offload_strategies as states
from surogate_optim_adamw_8bit.optimizer import ADAMW_8BIT, ADAMW_8BIT_OP, AdamW8bitOptions
from surogate_optim_normuon.optimizer import NORMUON, NORMUON_OP, NorMuonOptions
from surogate_qlora_fp4.format import FP4
from surogate_qlora_fp8.format import FP8
from surogate_qlora_nf4.format import NF4
from surogate_recipes_bf16.recipe import BF16
from surogate_recipes_fp8.recipe import FP8_HYBRID
from surogate_recipes_nvfp4.recipe import NVFP4

SEED = 7
STRATEGIES = {s.name: s for hook in (states, residual) for s in hook()}
EVERY = {**OPS, ADAMW_8BIT_OP.kind: ADAMW_8BIT_OP, NORMUON_OP.kind: NORMUON_OP}
FORMATS = {"nf4": NF4, "fp8 tiles": FP8, "fp4": FP4}
OFFLOAD = {
    "optimizer": {"offload_optimizer": True},
    "master": {"offload_master": True},
    "grads": {"offload_grads": True},
    "weights": {"offload_weights": True},
    "quants": {"offload_quants": True},
    "residual": {"offload_residual": True},
}
AXES: dict[str, tuple[Any, ...]] = {
    "level": ("states", "gradients", "weights", "both"),
    "optimizer": ("adamw", "adamw_8bit", "normuon"),
    "recipe": ("fp32", "bf16", "fp8", "nvfp4"),
    "base": ("trained", "lora", *FORMATS),
    "recompute": ("nothing", "norm", "block"),
    "offload": ("nothing", *OFFLOAD),
    "ranks": (2, 3, 4),
    "whole": (0, 2),
    "tied": (False, True),
}


def settings(one: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of PlanInputs for drawn settings, without the sharding."""
    recipes: dict[str, Any] = {"fp32": BF16, "bf16": BF16, "fp8": FP8_HYBRID, "nvfp4": NVFP4}
    recipe = recipes[one["recipe"]]
    request = PrecisionRequest(model_dtype="fp32" if one["recipe"] == "fp32" else "bf16")
    if one["recipe"] == "bf16":  # every value is rounded stochastically
        request = replace(request, master_dtype="bf16", param_grad_dtype="bf16")
        if one["optimizer"] != "adamw_8bit":
            request = replace(request, optimizer_state_dtype="bf16")
    options = recipe.options.model_validate({"skip_quant_last_layers": 1} if one["recipe"] == "nvfp4" else {})
    given: dict[str, Any] = {"recipe": recipe, "recipe_options": options, "request": request}
    given["precision"] = recipe.precision(request, options)
    optimizers = {
        "adamw_8bit": (ADAMW_8BIT, AdamW8bitOptions()),
        "normuon": (NORMUON, NorMuonOptions()),
    }
    if one["optimizer"] in optimizers:
        given["optimizer"], given["optimizer_options"] = optimizers[one["optimizer"]]
    if one["base"] != "trained":
        given["adapters"] = [(LORA, LoraOptions.model_validate({"lora_rank": 4, "lora_dropout": 0.1}))]
    if one["base"] in FORMATS:
        format = FORMATS[one["base"]]
        given["weight_format"] = format, format.options()
    parts = {"nothing": frozenset(), "norm": frozenset({"rmsnorm", "swiglu"}), "block": frozenset({"block"})}
    given["recompute"] = parts[one["recompute"]]
    if one["offload"] != "nothing":
        strategy = STRATEGIES[one["offload"]]
        given["offload"] = [(strategy, strategy.options.model_validate(OFFLOAD[one["offload"]]))]
    return given


def sharding(one: dict[str, Any]) -> Sharding:
    return Sharding(
        parts=one["ranks"],
        states=True,
        gradients=one["level"] in ("gradients", "both"),
        weights=one["level"] in ("weights", "both"),
        whole_blocks=one.get("whole", 0),
    )


def check(one: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
    config = tiny_config(**sizes, tie_word_embeddings=one["tied"])
    micro_steps = 1 if sharding(one).gradients else 2
    given = {"ops": EVERY, "weight_decay": 0.1, "max_grad_norm": 1.0, "micro_steps": micro_steps, "steps": 2}
    given |= settings(one)
    try:
        parallel = trained(config, one["ranks"], Sharding(parts=one["ranks"]), **given)
    except ConfigError as refusal:
        pytest.skip(f"no run has these settings: {refusal}")
    if one["offload"] == "grads" and not sharding(one).gradients and one["base"] == "trained":
        with pytest.raises(ConfigError, match="Set shard_gradients: true"):
            trained(config, one["ranks"], sharding(one), **given)
        return
    divided = trained(config, one["ranks"], sharding(one), **given)
    assert_equal(divided, parallel)
    matrices = [v for v in divided.assembly.params.values() if is_divisible(v.shard.shape if v.shard else v.shape, 4)]
    of_model = [v for v in matrices if "lora" not in v.name]
    assert all((v.shard is not None) == sharding(one).divides(v) for v in of_model)


QUICK = 10
"""Draws of the quick suite. The first ones cover the most new pairs."""


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, marks=() if at < QUICK else pytest.mark.slow, id=str(one))
        for at, one in enumerate(drawn(AXES, 16, SEED))
    ],
)
def test_divided_runs_give_the_bits_of_data_parallelism(one: dict[str, Any]) -> None:
    check(one)


@pytest.mark.slow
@pytest.mark.parametrize("one", drawn(AXES, 48, SEED + 1), ids=str)
def test_more_divided_runs_give_the_bits_of_data_parallelism(one: dict[str, Any]) -> None:
    check(one)
