"""Hooks of `surogate-models`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .kernels import KERNELS
from .llama import LLAMA
from .ops import OPS
from .qwen2 import QWEN2
from .qwen2_5_vl import QWEN2_5_VL
from .qwen3 import QWEN3
from .qwen3_vl import QWEN3_VL
from .smollm3 import SMOLLM3
from .smolvlm import IDEFICS3, SMOLVLM
from .tiny_config import TINY_CONFIG

SUROGATE_API = {"models": 1, "ops": 1, "kernels": 1, "diagnose": 1}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_WINDOWS = {"fullatt_block_indexes": [0], "window_size": 28}
_TEXT = {
    **TINY_CONFIG,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
SUROGATE_EXAMPLES = {
    "model qwen2_5_vl": [{"text_config": _TEXT, "vision_config": _TOWER | _WINDOWS}],
    **{f"model {kind}": [{"text_config": TINY_CONFIG, "vision_config": _SIGLIP}] for kind in ("idefics3", "smolvlm")},
    "model qwen3_vl": [{"text_config": _TEXT, "vision_config": _TOWER | {"deepstack_visual_indexes": [0]}}],
}
surogate_models = provides([IDEFICS3, LLAMA, QWEN2, QWEN2_5_VL, QWEN3, QWEN3_VL, SMOLLM3, SMOLVLM])
surogate_ops = provides(OPS)
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_models", KERNELS)
