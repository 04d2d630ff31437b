"""Quantized copies of trained weights, of which ranks make the parts that they have updated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from models.harness import OPS, plan_inputs, tiny_config
from sharding.ranks import Trained, assert_equal, trained
from sharding.test_combinations import settings, sharding

from surogate_core.api import OptimizerDef, UpdateContext
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.program.value import Value
from surogate_optim_adamw.adamw import ADAMW
from surogate_recipes_fp8.reference import fp8_quantize, fp8_scales

CONFIG = tiny_config(num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=96)
ONE = {"optimizer": "adamw", "base": "trained", "recompute": "nothing", "offload": "nothing"}
TWICE = {"recompute": "block", "offload": "quants"}
CASES = [
    *((recipe, level, ranks, {}) for recipe in ("fp8", "nvfp4") for level in ("states", "both") for ranks in (2, 3)),
    *((recipe, level, 3, TWICE) for recipe in ("fp8", "nvfp4") for level in ("states", "weights")),
]


def given(recipe: str, **more: Any) -> dict[str, Any]:
    return {"weight_decay": 0.1, "max_grad_norm": 1.0, **settings({**ONE, "recipe": recipe, **more})}


def planned(recipe: str, level: str, ranks: int) -> Assembly:
    divided = sharding({"level": level, "ranks": ranks})
    return assemble(plan_inputs(CONFIG, world_size=ranks, grad_accum_steps=1, sharding=divided, **given(recipe)))


def run(recipe: str, level: str, ranks: int, **more: Any) -> Trained:
    keys = {**given(recipe, **more), "micro_steps": 1, "steps": 3}
    return trained(CONFIG, ranks, sharding({"level": level, "ranks": ranks}), **keys)


@cache
def data_parallel(recipe: str, ranks: int, **more: Any) -> Trained:
    """Train ranks that hold all, once for all levels that are compared with them."""
    return run(recipe, "none", ranks, **more)


@pytest.mark.parametrize(("recipe", "level", "ranks", "more"), CASES, ids=str)
def test_steps_have_the_bits_of_data_parallelism(recipe: str, level: str, ranks: int, more: dict[str, Any]) -> None:
    """The first step of FP8 calibrates, and the evaluation follows an update. Three ranks have padded parts."""
    assert_equal(run(recipe, level, ranks, **more), data_parallel(recipe, ranks, **more))


@pytest.mark.parametrize(("level", "tied"), [("states", False), ("both", True)])
def test_steps_with_a_head_in_fp8_have_the_bits_of_data_parallelism(level: str, tied: bool) -> None:
    options = given("fp8")["recipe_options"].model_copy(update={"fp8_lm_head": True})
    keys = {**given("fp8"), "recipe_options": options, "micro_steps": 1, "steps": 3}
    parallel, divided = (
        trained(CONFIG | {"tie_word_embeddings": tied}, 3, sharding({"level": each, "ranks": 3}), **keys)
        for each in ("none", level)
    )
    assert_equal(divided, parallel)


def matrices(values: Any) -> set[Value]:
    return {v for v in values if v.role == "param" and v.block >= 0 and len(v.shape) == 2}


@pytest.mark.parametrize("level", ["states", "both"])
def test_an_update_quantizes_parts_by_the_largest_magnitudes_of_all_ranks(level: str) -> None:
    found = planned("fp8", level, 3)
    update = found.only("update")
    assert not matrices(v for op in update.ops for v in op.ins), "reads whole weights"
    assert not [op for op in update.ops if op.kind == "fp8_amax"]
    (maxima,) = (op for op in update.ops if op.kind == "all_reduce")
    weights = [op for op in update.ops if op.kind == "fp8_quantize"]
    assert len(weights) == len(maxima.ins) == 2 * 4 and maxima.attrs["how"] == "max"
    assert all(op.ins[0].shard and op.outs[0].shard for op in weights)


def test_micro_steps_gather_codes_and_nothing_else_of_a_block() -> None:
    found = planned("fp8", "states", 2)
    first, gather = found.micro_step(first=True, last=True), found.programs["gather"]
    gathered = {v for op in first.ops if op.kind == "all_gather" for v in op.outs}
    assert {v.dtype for v in gathered if v.block >= 0} == {"e4m3"}
    assert not matrices(gathered) and len(matrices(v for op in gather.ops for v in op.outs)) == 2 * 4


def test_weights_that_only_some_of_a_gather_are_read_of_are_gathered_alone() -> None:
    """Blocks that stay in bf16 are gathered with their updates, by one collective for all params."""
    options = given("fp8")["recipe_options"].model_copy(update={"skip_quant_last_layers": 1})
    divided = sharding({"level": "states", "ranks": 2})
    inputs = plan_inputs(CONFIG, world_size=2, grad_accum_steps=1, sharding=divided, **given("fp8"))
    found = assemble(replace(inputs, recipe_options=options, update_groups=lambda params: (params,)))
    (every,) = (op for op in found.programs["gather"].ops if op.outs[0].role == "param")
    first = found.micro_step(first=True, last=True)
    (some,) = (op for op in first.ops if op.kind == "all_gather" and op.outs[0].role == "param")
    assert {v.block for v in matrices(every.outs)} == {0, 1} and {v.block for v in matrices(some.outs)} == {1}
    assert some.attrs["shapes"] == tuple(v.shape for v in some.outs)


def without_amax(context: UpdateContext) -> None:
    ADAMW.update(replace(context, params=[replace(p, amax=None) for p in context.params]))


@pytest.mark.parametrize("level", ["states", "both"])
def test_an_optimizer_that_measures_nothing_has_the_recipe_read_whole_weights(level: str) -> None:
    optimizer: OptimizerDef = replace(ADAMW, update=without_amax)
    keys = {**given("fp8"), "optimizer": optimizer, "micro_steps": 1, "steps": 2}
    parallel, divided = (trained(CONFIG, 3, sharding({"level": each, "ranks": 3}), **keys) for each in ("none", level))
    assert_equal(divided, parallel)
    assert_equal(parallel, trained(CONFIG, 3, sharding({"level": level, "ranks": 3}), **{**keys, "optimizer": ADAMW}))
    assert not [v for v in divided.assembly.declared if v.name.startswith("amax.")]
    first = divided.assembly.micro_step(first=True, last=True)
    gathered = {v.dtype for op in first.ops if op.kind == "all_gather" for v in op.outs if v.block >= 0}
    assert gathered == ({"e4m3"} if level == "both" else set()), "gathers codes of weights that the update gathers"


def test_a_part_is_quantized_as_in_the_whole() -> None:
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    (scale,) = fp8_scales(x.abs().max().float(), maximum=448.0)
    (whole,) = fp8_quantize(x, scale, dtype="e4m3", scaling="given")
    for first in (0, 1024, 2048):
        (part,) = fp8_quantize(x.flatten()[first : first + 1024], scale, dtype="e4m3", scaling="given")
        assert torch.equal(part.view(torch.uint8), whole.flatten()[first : first + 1024].view(torch.uint8))
    infer, attrs = OPS["fp8_quantize"].infer, {"dtype": "e4m3", "scaling": "given"}
    values = Value("x", (1024,), "bf16", "param"), Value("scale", (2,), "fp32", "state")
    assert [spec.shape for spec in infer(values, attrs)] == [(1024,)]
    for more in ("transposed", "column_sums"):
        with pytest.raises(Exception, match=r"a matrix is quantized, or a part of it, not \[1024\]"):
            infer(values, attrs | {more: True})
