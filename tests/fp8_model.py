"""A tiny model under the fp8-hybrid recipe, or in bf16 for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import recipe_model
from models.harness import tiny_config
from recipe_model import LENGTH, ROWS, differing, kinds, lora_rank_8

from surogate_core.api import NoOptions, PrecisionRequest
from surogate_recipes_bf16.recipe import BF16
from surogate_recipes_fp8.recipe import E4M3_E5M2, FP8_HYBRID, Fp8Options

__all__ = [
    "BIASED", "CONFIG", "LAYERS", "LENGTH", "PRODUCTS", "ROWS", "VOCABULARY", "Model", "differing", "kinds",
    "lora_rank_8", "operands_under_bf16", "options",
]  # fmt: skip

LAYERS, VOCABULARY = 3, 64
CONFIG = tiny_config(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=LAYERS, head_dim=16)
BIASED = tiny_config(
    model_type="qwen2", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=80, num_hidden_layers=LAYERS
)
PRODUCTS = 4
"""Products with a weight of a block: qkv, o, gate_up, down."""


def options(**changes: Any) -> Fp8Options:
    return Fp8Options.model_validate({"fp8_amax_history": 4} | changes)


class Model(recipe_model.Model):
    """A tiny model, under fp8-hybrid or bf16."""

    def __init__(self, config: Mapping[str, Any] = CONFIG, *, fp8: bool = True, **changes: Any) -> None:
        if fp8:
            changes |= {"recipe": FP8_HYBRID, "options": options(**changes.pop("options", {}))}
        super().__init__(config, **changes)


def operands_under_bf16() -> dict[str, Any]:
    """The settings of `recipe: bf16` with FP8 operands."""
    precision = BF16.precision(PrecisionRequest(matmul_dtype="e4m3", gradient_dtype="e5m2"), NoOptions())
    return {"fp8": False, "precision": precision, "lowering": E4M3_E5M2}
