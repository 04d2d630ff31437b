"""Qwen3-VL, text: a Qwen3 in a class with a vision tower, which is kept."""

from __future__ import annotations

from .outer import outer
from .qwen3 import QWEN3

QWEN3_VL = outer(
    QWEN3,
    name="qwen3_vl",
    summary="Qwen3-VL dense: the text is trained, the vision tower is kept",
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    text_types=("qwen3_vl_text",),
    towers={"vision_config": ("model.visual.*",)},
    tied=False,
    defaults={"max_position_embeddings": 128_000, "rope_theta": 500_000.0},  # of Qwen3VLTextConfig in transformers
)
