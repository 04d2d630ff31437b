"""A tiny model under the nvfp4 recipe on the CPU, where references quantize exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.harness import tiny_config
from recipe_model import Model

from surogate_core.api import Op, Program
from surogate_recipes_nvfp4.recipe import NVFP4, Nvfp4Options

LAYERS, VOCABULARY = 3, 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": LAYERS, "intermediate_size": 96}
CONFIG = tiny_config(**SIZES)
BIASED = tiny_config(model_type="qwen2", **SIZES)
PRODUCTS = 4
"""Products with a weight of a block: qkv, o, gate_up, down."""

WHOLE = {"skip_quant_last_layers": 0}
"""Options that leave no block in bf16."""


def model(config: Mapping[str, Any] = CONFIG, *, skip: bool = False, **changes: Any) -> Model:
    """Return a tiny model under the recipe, all of whose blocks are quantized unless `skip`."""
    given = ({} if skip else WHOLE) | changes.pop("options", {})
    return Model(config, recipe=NVFP4, options=Nvfp4Options.model_validate(given), **changes)


def trained(steps: int = 2, **settings: Any) -> Model:
    run = model(**settings)
    for _ in range(steps):
        run.step()
    return run


def ops_of(program: Program, *wanted: str) -> list[Op]:
    return [op for op in program.ops if op.kind in wanted]


def quantizers(program: Program, which: str) -> list[Op]:
    """The ops of a micro-step that quantize "x" or "dy"."""
    return [op for op in ops_of(program, "nvfp4_quantize") if (op.phase == "backward") == (which == "dy")]


def named(ops: list[Op], name: str) -> set[Any]:
    """The values that an attribute has in `ops`; None where it has its default."""
    return {op.attrs.get(name) or None for op in ops}
