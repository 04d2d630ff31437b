"""Hooks of `surogate-models-muse`."""

from __future__ import annotations

from typing import Any

from surogate_core.api import provides
from surogate_models.api import TINY_CONFIG

from .muse_glimmer import MUSE_GLIMMER

SUROGATE_API = {"models": 1}
_TEXT = {key: value for key, value in TINY_CONFIG.items() if key != "hidden_act"}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_EXAMPLE: dict[str, Any] = {
    "text_config": {**_TEXT, "sliding_window": 16},
    "vision_config": _TOWER,
    "out_hidden_size": 128,
    "projector_hidden_size": 64,
}
_OTHER_LAYERS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "layer_rope_theta": [10000.0, 0],
    "attention_bias": True,
    "tie_word_embeddings": True,
}
SUROGATE_EXAMPLES = {
    "model muse_glimmer": [
        _EXAMPLE,
        {**_EXAMPLE, "text_config": {**_EXAMPLE["text_config"], **_OTHER_LAYERS}, "tie_word_embeddings": True},
    ]
}
surogate_models = provides([MUSE_GLIMMER])
