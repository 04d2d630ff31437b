"""Hooks of `surogate-models-gemma`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks
from surogate_models.api import TINY_CONFIG

from .gemma import GEMMA2, GEMMA3, GEMMA3_OUTER
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
_TEXT = {**TINY_CONFIG, "rope_parameters": None, "sliding_window_pattern": 2}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
SUROGATE_EXAMPLES = {
    "model gemma3": [_TEXT],
    "model gemma3_vision": [
        {"text_config": _TEXT, "vision_config": _TOWER, "mm_tokens_per_image": 4, "tie_word_embeddings": False}
    ],
}
surogate_models = provides([GEMMA2, GEMMA3, GEMMA3_OUTER])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models_gemma", KERNELS)
