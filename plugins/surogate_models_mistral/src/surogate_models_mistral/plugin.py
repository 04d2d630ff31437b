"""Hooks of `surogate-models-mistral`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_models.api import TINY_CONFIG

from .ministral3 import MINISTRAL3
from .mistral import MINISTRAL, MISTRAL
from .mistral3 import MISTRAL3

SUROGATE_API = {"models": 1}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}
_TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
}
SUROGATE_EXAMPLES = {
    "model ministral3": [{**TINY_CONFIG, "rope_parameters": _ROPE}],
    "model mistral3": [
        {"text_config": {**TINY_CONFIG, **text}, "vision_config": _TOWER, "tie_word_embeddings": False}
        for text in ({"model_type": "mistral"}, {"model_type": "ministral3", "rope_parameters": _ROPE})
    ],
}
surogate_models = provides([MISTRAL, MINISTRAL, MINISTRAL3, MISTRAL3])
