"""A precise matrix (`WeightMap.precise`) is never quantized. One whose sizes do not fit refuses no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import corrected_family
import pytest
import torch
from corrected_family import MODEL, OPS, OWN, dims, marked
from models.harness import OPS as EVERY
from models.harness import plan_inputs, tiny_config
from mxfp8_recipe import MXFP8
from mxfp8_recipe import OPS as MX_OPS
from recipe_model import Model, lora_rank_8

from surogate_core.api import NoOptions, PrecisionRequest, RecipeDef
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import ConfigError, ProgramError
from surogate_qlora_fp4.format import FP4
from surogate_qlora_fp8.format import FP8
from surogate_qlora_nf4.format import NF4
from surogate_recipes_bf16.recipe import BF16
from surogate_recipes_fp8.recipe import FP8_HYBRID
from surogate_recipes_nvfp4.recipe import NVFP4

CONFIG: Mapping[str, Any] = {
    **tiny_config(hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32),
    **OWN,
    "model_type": "qwen3",
}
EVERY_OP = {**EVERY, **{op.kind: op for op in (*OPS, *MX_OPS)}}
RECIPES = (FP8_HYBRID, NVFP4, MXFP8)
GATES = ("layers.0.attn.gate", "layers.1.attn.gate")


def family(model: Any = MODEL, config: Mapping[str, Any] = CONFIG) -> dict[str, Any]:
    return {"model": model, "dims": dims(config), "ops": EVERY_OP}


def of_recipe(recipe: RecipeDef, model: Any = MODEL, config: Mapping[str, Any] = CONFIG, **changes: Any) -> Model:
    options = recipe.options.model_validate({"skip_quant_first_layers": 0, "skip_quant_last_layers": 0})
    return Model(config, recipe=recipe, options=options, **{**family(model, config), **changes})


def quantized(assembly: Assembly) -> set[str]:
    """Return the weights that `derive` makes a copy of, those of a frozen base among them."""
    staged = {param.name for part in assembly.staging for param in part.places}
    return staged | {v.name for op in assembly.programs["derive"].ops for v in op.ins if v.role == "param"}


def wide(model: Any, rows: int) -> Any:
    """Return a family whose gates have as many rows."""

    def build(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corrected_family, "GATES", rows)
            return MODEL.build(*given)

    def weights(d: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corrected_family, "GATES", rows)
            return model.weights(d)

    return replace(model, build=build, weights=weights)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipes_leave_it_in_the_dtype_of_the_model(recipe: RecipeDef, lora: bool) -> None:
    more = lora_rank_8() if lora else {}
    names = {"precise": quantized(of_recipe(recipe, wide(MODEL, 32), **more).assembly)}
    names["other"] = quantized(of_recipe(recipe, wide(marked(precise=False), 32), **more).assembly)
    assert names["other"] - names["precise"] == {*GATES}
    assert {"layers.0.attn.qkv", "layers.1.attn.o"} <= names["precise"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_its_product_has_the_bits_of_the_dtype_of_the_model(recipe: RecipeDef) -> None:
    model = of_recipe(recipe)
    kinds = {op.kind for op in model.assembly.only("evaluate").ops for v in op.ins if v.name in GATES}
    assert kinds == {"linear"}
    before = model.view(model.assembly.params[GATES[0]]).clone()
    model.step()
    assert not torch.equal(before, model.view(model.assembly.params[GATES[0]]))


def _stored(format: Any, model: Any) -> set[str]:
    options = format.options.model_validate({format.key: True})
    given = {**family(wide(model, 32)), **lora_rank_8(), "weight_format": (format, options)}
    bf16 = BF16.precision(PrecisionRequest(model_dtype="bf16"), NoOptions())
    return {*assemble(plan_inputs(CONFIG, **given, precision=bf16)).stored}


@pytest.mark.parametrize("format", [NF4, FP8, FP4], ids=lambda format: format.name)
def test_weight_formats_do_not_store_it(format: Any) -> None:
    precise, other = _stored(format, MODEL), _stored(format, marked(precise=False))
    assert other - precise == {*GATES} and "layers.0.attn.qkv" in precise


def test_adapters_adapt_it() -> None:
    names = {param.name for param in assemble(plan_inputs(CONFIG, **family(), **lora_rank_8())).trainable}
    assert "model.layers.0.self_attn.gate_proj.lora_A" in names


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_matrix_whose_sizes_do_not_fit_stays_in_the_dtype_of_the_model(recipe: RecipeDef) -> None:
    marked_model, plain = of_recipe(recipe), of_recipe(recipe, marked(precise=False))
    assert quantized(plain.assembly) == quantized(marked_model.assembly) != set()
    losses = [model.step() for model in (marked_model, plain)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_model_of_which_nothing_fits_is_refused(recipe: RecipeDef) -> None:
    config = {**CONFIG, "hidden_size": 72, "moe_intermediate_size": 72}
    with pytest.raises(ConfigError, match=r"columns in layers.0.attn.qkv, got 72. For this model use recipe: bf16"):
        of_recipe(recipe, config=config)


def test_a_model_of_precise_matrices_alone_is_refused() -> None:
    precise = replace(MODEL, weights=lambda d: [_precise(m) for m in MODEL.weights(d)])
    with pytest.raises(ConfigError, match="this model has no matrix in blocks that"):
        of_recipe(NVFP4, precise)


def _precise(m: Any) -> Any:
    return replace(m, precise=m.kind is None and m.param.endswith((".gate", ".qkv", ".o", ".gate_up", ".down")))


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("layers.0.attn.norm", r"layers.0.attn.norm \[64\] is precise=True"),
        ("lm_head", r"lm_head \[97, 64\] outside of blocks is precise=True"),
        ("layers.0.mlp.router", r"layers.0.mlp.router \[4, 64\] of the kind 'router' is precise=True"),
    ],
)
def test_what_no_recipe_quantizes_anyway_is_not_precise(param: str, message: str) -> None:
    def weights(d: Any) -> Any:
        return [replace(m, precise=True) if m.param == param else m for m in MODEL.weights(d)]

    with pytest.raises(ProgramError, match=message):
        assemble(plan_inputs(CONFIG, **family(replace(MODEL, weights=weights))))
