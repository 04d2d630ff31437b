"""Hooks of `surogate-models-mistral`."""

from __future__ import annotations

from surogate_core.api import provides

from .ministral3 import MINISTRAL3
from .mistral import MINISTRAL, MISTRAL

SUROGATE_API = {"models": 1}
SUROGATE_EXAMPLES = {
    "model ministral3": [
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            }
        }
    ]
}
surogate_models = provides([MISTRAL, MINISTRAL, MINISTRAL3])
