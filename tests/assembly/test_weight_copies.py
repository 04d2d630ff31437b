"""FP8 copies of frozen matrices that a weight format makes of what it stores: the bits of the recipe in fewer bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fp8_model import LAYERS, PRODUCTS, Model, differing, lora_rank_8, operands_under_bf16
from models.harness import OPS, tiny_config
from torch import Tensor

from surogate_core.api import WEIGHT_LABEL, Op, Program, StorageContext, Value, WeightFormatDef
from surogate_core.errors import ProgramError
from surogate_core.reference.ops import load
from surogate_core.testing.kernels import same_bits
from surogate_qlora_fp4.format import FP4
from surogate_qlora_fp8.format import FP8
from surogate_qlora_nf4.format import NF4
from surogate_recipes_fp8.reference import fp8_amax, fp8_quantize

CONFIG = tiny_config(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, head_dim=16)
RECIPES: dict[str, dict[str, Any]] = {"fp8-hybrid": {}, "e4m3 under bf16": operands_under_bf16()}
FORMATS: dict[str, tuple[WeightFormatDef, dict[str, Any]]] = {
    "nf4": (NF4, {}),
    "nf4 without double quantization": (NF4, {"qlora_bnb_double_quant": False}),
    "fp8": (FP8, {"qlora_block_size": 64}),
    "fp4": (FP4, {}),
}
COPY_KINDS = {"nf4_to_e4m3", "fp8_tile_to_e4m3", "fp4_block_to_e4m3"}
DEQUANTIZE_KINDS = {"nf4_dequantize", "fp8_tile_dequantize", "fp4_block_dequantize"}


def model(recipe: str, name: str, **changes: Any) -> Model:
    """Return the tiny model with an adapter, its frozen matrices in a format. `changes`: of the format, or the plan."""
    format, options = FORMATS[name]
    if "copies" in changes:
        format = replace(format, copies=changes.pop("copies"))
    chosen = {"weight_format": (format, format.options.model_validate(options))}
    return Model(CONFIG, **{**RECIPES[recipe], **lora_rank_8(), **chosen, **changes})


def programs(of: Model) -> list[Program]:
    return [p for p in of.assembly.programs.values() if p.name.startswith(("micro", "calibrate", "evaluate"))]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FORMATS)
def test_training_has_the_bits_of_dequantizing_and_quantizing(name: str, recipe: str) -> None:
    direct, generic = model(recipe, name), model(recipe, name, copies=None)
    for _ in range(3):
        assert direct.step() == generic.step()
        assert differing(direct.named("grad"), generic.named("grad")) == []
    assert direct.evaluate() == generic.evaluate()
    kinds = Counter(op.kind for p in programs(direct) for op in p.ops)
    assert not DEQUANTIZE_KINDS & kinds.keys() and COPY_KINDS & kinds.keys()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "parts", [frozenset(), frozenset({"block"}), frozenset({"adapter"}), frozenset({"ffn"})], ids=str
)
def test_a_pass_makes_each_copy_once_and_only_those_that_it_reads(recipe: str, parts: frozenset[str]) -> None:
    direct, generic = model(recipe, "fp8", recompute=parts), model(recipe, "fp8", copies=None, recompute=parts)
    for program in programs(direct):
        read = {v for op in program.ops for v in op.ins}
        copies = [op for op in program.ops if op.kind in COPY_KINDS]
        assert all(op.outs[0] in read for op in copies)
        made = Counter((op.ins, op.attrs["transposed"], op.phase == "forward") for op in copies)
        assert set(made.values()) == {1}
        assert sum(op.phase == "forward" for op in copies) == LAYERS * PRODUCTS
    assert direct.step() == generic.step()
    assert differing(direct.named("grad"), generic.named("grad")) == []


def test_products_of_the_first_pass_read_rows_and_those_of_the_second_the_transposed_copy() -> None:
    """Where products need the summed dimension contiguous, as on Hopper and in the references."""
    (first,) = (p for p in programs(model("fp8-hybrid", "fp8")) if p.name == "micro_first")
    copies = [op for op in first.ops if op.kind in COPY_KINDS]
    assert all(op.attrs["transposed"] == (op.phase == "backward") for op in copies)
    assert sum(op.phase == "backward" for op in copies) == LAYERS * PRODUCTS - 1, "no product reads d_x of the first"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("special", [0.0, 1e-30, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_references_have_the_bits_of_the_recipe(name: str, special: float, dtype: torch.dtype) -> None:
    """Of fused matrices, one of zeros and one with a special number."""
    gen = torch.Generator().manual_seed(3)
    w = torch.randn(64, 128, generator=gen) * torch.tensor([1e-3, 20.0]).repeat(32)[:, None]
    w[16:32] = 0
    w[40, 5] = special
    run = _stored(name, w.to(dtype))
    dequantized, amax = run("dequantize"), run("amax")
    assert same_bits(amax, torch.stack([fp8_amax(part) for part in dequantized.split([16, 16, 32])]))
    rows, transposed, scale = fp8_quantize(dequantized, dtype="e4m3", scaling="current", transposed=True)
    for is_transposed, expected in ((False, rows), (True, transposed)):
        copy, own = run("to_e4m3", amax, transposed=is_transposed)
        assert same_bits(copy, expected)
        assert same_bits(own.nan_to_num(nan=-1), scale.nan_to_num(nan=-1))


def _stored(name: str, w: Tensor) -> Callable[..., Any]:
    """Store a weight in a format. Return a function that calls the reference of an op which reads what is stored."""
    format, options = FORMATS[name]
    prefix, own, more = {
        "nf4": ("nf4", {"block": 64}, {"double": not options}),
        "fp8": ("fp8_tile", {"tile": 64}, {}),
        "fp4": ("fp4_block", {}, {"four_over_six": True}),
    }[format.name]
    attrs = {"rows": (16, 16, 32), **own}
    stored = list(load(OPS[f"{prefix}_quantize"].reference)(w, **attrs, **more))
    if format is NF4:
        attrs["shape"] = tuple(w.shape)
    attrs["dtype"] = {torch.bfloat16: "bf16", torch.float32: "fp32"}[w.dtype]

    def run(op: str, *rest: Tensor, **changes: Any) -> Any:
        return load(OPS[f"{prefix}_{op}"].reference)(*stored, *rest, **attrs, **changes)

    return run


def test_a_format_that_returns_none_is_dequantized() -> None:
    def none(stored: Sequence[Value], op: Op, outputs: Sequence[int], context: StorageContext[Any]) -> None:
        assert op.kind == "fp8_quantize" and op.ins == (context.param.param,)
        assert outputs and all(0 <= i < len(op.outs) for i in outputs)

    direct, generic = model("fp8-hybrid", "fp8", copies=none), model("fp8-hybrid", "fp8", copies=None)
    assert [[op.kind for op in p.ops] for p in programs(direct)] == [
        [op.kind for op in p.ops] for p in programs(generic)
    ]


def test_a_copy_must_be_like_that_of_the_recipe() -> None:
    def wrong(stored: Sequence[Value], op: Op, outputs: Sequence[int], context: StorageContext[Any]) -> Sequence[Value]:
        return [context.builder.apply("cast", stored[1], label=WEIGHT_LABEL, dtype="bf16") for _ in outputs]

    with pytest.raises(ProgramError, match=r"copies of weight format fp8 returned .*bf16.* expected e4m3\["):
        model("fp8-hybrid", "fp8", copies=wrong)


def test_a_recipe_that_reads_the_matrix_gets_no_copies() -> None:
    options = FP8.options.model_validate({})
    plain = Model(CONFIG, fp8=False, weight_format=(FP8, options), **lora_rank_8())
    kinds = Counter(op.kind for p in programs(plain) for op in p.ops)
    assert DEQUANTIZE_KINDS & kinds.keys() and not COPY_KINDS & kinds.keys()
