"""A param that is never trained (`WeightMap.trained`): no gradient, no master, no state, no step that changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from corrected_family import MODEL, OPS, OWN, dims
from models.harness import OPS as EVERY
from models.harness import plan_inputs, tiny_config
from recipe_model import Model, lora_rank_8
from sharding.ranks import assert_equal, trained

from surogate_core.api import RecipeDef
from surogate_core.assembly.assemble import assemble
from surogate_core.errors import DisconnectedError, ProgramError
from surogate_core.program.shards import Sharding
from surogate_loss_preference.losses import LOSSES, DpoOptions
from surogate_recipes_bf16.recipe import BF16
from surogate_recipes_fp8.recipe import FP8_HYBRID
from surogate_recipes_nvfp4.recipe import NVFP4

CONFIG: Mapping[str, Any] = {
    **tiny_config(hidden_size=64, intermediate_size=64, num_hidden_layers=2),
    **OWN,
    "model_type": "qwen3",
}
FAMILY: Mapping[str, Any] = {"model": MODEL, "dims": dims(CONFIG), "ops": {**EVERY, **{op.kind: op for op in OPS}}}
BIASES = ("layers.0.mlp.bias", "layers.1.mlp.bias")
RECIPES = (BF16, FP8_HYBRID, NVFP4)


def of_recipe(recipe: RecipeDef, **changes: Any) -> Model:
    options = {"skip_quant_first_layers": 0, "skip_quant_last_layers": 0} if recipe is not BF16 else {}
    return Model(CONFIG, recipe=recipe, options=recipe.options(**options), **FAMILY, **changes)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_it_has_no_gradient_no_master_and_no_state_and_steps_leave_it(recipe: RecipeDef) -> None:
    model = of_recipe(recipe, weight_decay=0.1)
    before = {name: model.view(model.assembly.params[name]).clone() for name in BIASES}
    for _ in range(3):
        model.step()
    declared = {v.name: v for v in model.assembly.declared}
    assert [name for name in declared if any(bias in name for bias in BIASES)] == [*BIASES]
    assert all(declared[name].dtype == "fp32" for name in BIASES)
    assert all(torch.equal(model.view(model.assembly.params[name]), x) for name, x in before.items())
    assert model.assembly.n_params - model.assembly.n_trainable == sum(x.numel() for x in before.values())


@pytest.mark.parametrize("divided", [{"states": True}, {"states": True, "gradients": True, "weights": True}])
def test_ranks_that_divide_train_the_bits_of_ranks_that_do_not(divided: dict[str, bool]) -> None:
    given = {**FAMILY, "micro_steps": 1, "weight_decay": 0.1}
    whole = trained(CONFIG, 2, Sharding(parts=2), **given)
    parts = trained(CONFIG, 2, Sharding(parts=2, **divided), **given)
    assert_equal(parts, whole)
    assert not any(bias in name for name in parts.states for bias in BIASES)


def test_adapters_do_not_see_it() -> None:
    seen = []
    ((lora, options),) = lora_rank_8()["adapters"]

    def trainable(param: Any, stored: Any, options: Any) -> bool:
        seen.append(param.name)
        return True

    greedy = replace(lora, trainable=trainable)
    assembly = assemble(plan_inputs(CONFIG, **FAMILY, adapters=[(greedy, options)]))
    names = {param.name for param in assembly.trainable}
    assert "layers.0.mlp.gate_up" in names and not names.intersection(BIASES) and not set(seen).intersection(BIASES)


def untrained(*ends: str, **marks: bool) -> Mapping[str, Any]:
    def weights(d: Any) -> Any:
        given = {"trained": False, **marks}
        return [replace(m, **given) if m.param.endswith(ends) else m for m in MODEL.weights(d)]

    return {**FAMILY, "model": replace(MODEL, weights=weights)}


def test_an_adapter_leaves_a_matrix_alone_that_is_never_trained() -> None:
    assembly = assemble(plan_inputs(CONFIG, **untrained(".o"), **lora_rank_8()))
    adapted = {param.name.split(".")[-2] for param in assembly.trainable}
    assert adapted == {"q_proj", "k_proj", "v_proj", "gate_proj"}


def test_a_frozen_reference_does_not_copy_it() -> None:
    given = {"loss": LOSSES[0], "loss_options": DpoOptions(), "frozen_reference": True}
    assembly = assemble(plan_inputs(CONFIG, **FAMILY, **given))
    copies = {v.name.removeprefix("reference.") for v in assembly.declared if v.name.startswith("reference.")}
    assert "layers.0.mlp.router" in copies and not copies.intersection(BIASES)


def test_a_model_that_trains_the_bias_must_give_its_gradient() -> None:
    with pytest.raises(DisconnectedError, match=r"cut off by vjp of test_corrected_route .*: layers.0.mlp.bias"):
        assemble(plan_inputs(CONFIG, **untrained(".mlp.bias", trained=True)))


def test_what_is_new_has_to_be_trained() -> None:
    with pytest.raises(ProgramError, match=r"model corrected: layers.0.mlp.bias is new=True.* trained=False"):
        assemble(plan_inputs(CONFIG, **untrained(".mlp.bias", new=True)))


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(DisconnectedError, match="depends on no trainable param"):
        assemble(plan_inputs(CONFIG, **untrained("")))
