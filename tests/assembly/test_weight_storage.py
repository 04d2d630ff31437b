"""Frozen matrices in a weight format: what is stored, what reads it, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fp8_model import CONFIG, LAYERS, Model, differing, kinds, lora_rank_8, operands_under_bf16
from pydantic import BaseModel

from surogate_core.api import (
    WEIGHT_LABEL,
    LowerContext,
    NoOptions,
    OffloadContext,
    OffloadDef,
    Programs,
    RecipeDef,
    StorageContext,
    Value,
    WeightFormatDef,
)
from surogate_core.errors import ConfigError, ProgramError
from surogate_recipes_bf16.recipe import BF16

MATRICES = 4
"""Matrices of a block: qkv, o, gate_up, down."""


class Options(BaseModel):
    dtype: str = "bf16"


def quantize(context: StorageContext[Options]) -> Sequence[Value]:
    b, matrix, dtype = context.builder, context.param.param, context.options.dtype
    stored = b.state(f"{matrix.name}.stored", matrix.shape, dtype, None, derived=True)
    return b.emit("cast", matrix, outs=[stored], dtype=dtype)


def dequantize(stored: Sequence[Value], context: StorageContext[Options]) -> Value:
    return context.builder.apply("cast", *stored, label=WEIGHT_LABEL, dtype=context.param.param.dtype)


CAST = WeightFormatDef(name="cast", summary="", options=Options, key="cast", quantize=quantize, dequantize=dequantize)

RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"fp8": False},
    "fp8-hybrid": {},
    "e4m3 under bf16": operands_under_bf16(),
}


def model(recipe: str, dtype: str = "", **changes: Any) -> Model:
    """Return the tiny model with an adapter, its frozen matrices stored in `dtype`; "": not stored."""
    chosen = {"weight_format": (CAST, Options(dtype=dtype))} if dtype else {}
    return Model(CONFIG, **{**RECIPES[recipe], **lora_rank_8(), **chosen, **changes})


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_format_that_rounds_nothing_changes_no_bit(recipe: str) -> None:
    plain, stored = model(recipe), model(recipe, "bf16")
    for _ in range(3):
        assert plain.step() == stored.step()
        assert differing(plain.named("grad"), stored.named("grad")) == []
    assert plain.evaluate() == stored.evaluate()


def test_training_reads_the_rounded_weights() -> None:
    plain, stored = model("bf16"), model("bf16", "e4m3")
    rounded = 0
    for value in plain.assembly.allocated:
        if value.role == "param" and value.block >= 0 and len(value.shape) == 2 and "lora" not in value.name:
            weight = plain.view(value)
            weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))
            rounded += 1
    assert rounded == LAYERS * MATRICES
    assert plain.step() == stored.step()
    assert differing(plain.named("grad"), stored.named("grad")) == []


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "parts", [frozenset(), frozenset({"block"}), frozenset({"adapter"}), frozenset({"ffn"})], ids=str
)
def test_no_matrix_is_kept_between_the_passes_whatever_is_recomputed(recipe: str, parts: frozenset[str]) -> None:
    plain, stored = model(recipe, "bf16"), model(recipe, "bf16", recompute=parts)
    (program,) = (p for p in stored.assembly.programs.values() if p.name == "micro_first")
    for value in {v for op in program.ops for v in op.outs if v.label == WEIGHT_LABEL}:
        phases = {op.phase for op in program.ops if value in op.ins}
        assert phases == {"forward"} or "forward" not in phases, value
    assert plain.step() == stored.step()
    assert differing(plain.named("grad"), stored.named("grad")) == []


def test_the_matrices_have_no_memory_but_that_of_the_format() -> None:
    plain, stored = model("bf16"), model("bf16", "e4m3")
    names = {v.name for v in stored.assembly.allocated}
    staged = {param.name for part in stored.assembly.staging for param in part.places}
    assert len(staged) == LAYERS * MATRICES and names.isdisjoint(staged)
    assert {f"{name}.stored" for name in staged} <= names
    sizes = [sum(v.nbytes for v in m.assembly.allocated if v.role in ("param", "state")) for m in (plain, stored)]
    matrices = sum(v.nbytes for v in plain.assembly.allocated if v.name in staged)
    assert sizes[0] - sizes[1] == matrices / 2
    assert [len(part.program.ops) for part in stored.assembly.staging] == [MATRICES] * LAYERS


def test_copies_that_the_recipe_would_keep_are_made_from_the_stored_form() -> None:
    stored = model("fp8-hybrid", "bf16")
    assert kinds(stored.assembly.only("derive"))["fp8_quantize"] == 0
    frozen = [v for v in stored.assembly.allocated if v.role == "state" and v.derived]
    assert len(frozen) == LAYERS * MATRICES, "the recipe's own copies are withdrawn"
    first = stored.assembly.programs["micro_first"]
    assert sum(op.kind == "fp8_quantize" and op.ins[0].label == WEIGHT_LABEL for op in first.ops) > LAYERS * MATRICES


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_stored_form_can_be_held_by_the_host(recipe: str) -> None:
    def held(family: Programs, context: OffloadContext) -> list[Value]:
        return [v for v in dict.fromkeys(v for op in family.micro.ops for v in op.ins) if v.derived]

    strategy = OffloadDef(name="stored", summary="", selected=lambda options: True, on_host=held)
    plain, stored = model(recipe), model(recipe, "bf16", offload=[(strategy, NoOptions())])
    assert kinds(stored.assembly.programs["micro_first"])["move"] > LAYERS * MATRICES
    assert plain.step() == stored.step()
    assert differing(plain.named("grad"), stored.named("grad")) == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parts", [frozenset(), frozenset({"block"})], ids=str)
def test_embedding_and_head_can_be_stored_too(tied: bool, parts: frozenset[str]) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    kinds_ = frozenset({"matrix", "head", "embedding"})
    chosen = {"weight_format": (CAST, Options()), "stored_kinds": kinds_, "recompute": parts}
    plain, stored = (Model(config, fp8=False, **lora_rank_8(), **changes) for changes in ({}, chosen))
    outside = [param for part in stored.assembly.staging for param in part.places if param.block < 0]
    assert len(outside) == (1 if tied else 2)
    for program in stored.assembly.programs.values():
        yielded = {op.outs[0]: op for op in program.ops if op.block < 0 and op.outs[0].label == WEIGHT_LABEL}
        for value in yielded:
            assert sum(value in op.ins for op in program.ops) == 1, "no matrix outside of blocks is kept for a later op"
    assert plain.step() == stored.step()
    assert differing(plain.named("grad"), stored.named("grad")) == []
    assert plain.evaluate() == stored.evaluate()


def test_a_run_that_trains_every_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cast: this run trains every matrix of the model's blocks\. Leave it out"):
        Model(CONFIG, fp8=False, weight_format=(CAST, Options()))


def test_a_format_must_yield_the_matrix() -> None:
    def wrong(stored: Sequence[Value], context: StorageContext[Options]) -> Value:
        return context.builder.apply("cast", *stored, label=WEIGHT_LABEL, dtype="fp32")

    with pytest.raises(ProgramError, match=r"dequantize of weight format cast returned .*fp32.* expected bf16\["):
        model("bf16", weight_format=(replace(CAST, dequantize=wrong), Options()))


def test_a_recipe_that_reads_frozen_weights_in_the_update_is_refused() -> None:
    def lower(family: Programs, context: LowerContext) -> Programs:
        frozen = next(p for p in context.params if len(p.shape) == 2 and p.block >= 0)
        b = context.builder
        with b.record("update") as ops:
            b.emit("cast", frozen, outs=[b.state("copy", frozen.shape, "fp32", None)], dtype="fp32")
        return replace(family, update=replace(family.update, ops=(*family.update.ops, *ops)))

    recipe: RecipeDef = replace(BF16, lower=lower)
    with pytest.raises(ProgramError, match=r"update: uses .* which is stored in cast; only micro-steps"):
        Model(CONFIG, fp8=False, recipe=recipe, weight_format=(CAST, Options()), **lora_rank_8())
