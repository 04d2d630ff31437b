"""Qwen2.5-VL, text: a Qwen2.5 in a class with a vision tower, which is kept."""

from __future__ import annotations

from .outer import outer
from .qwen2 import QWEN2

QWEN2_5_VL = outer(
    QWEN2,
    name="qwen2_5_vl",
    summary="Qwen2.5-VL: the text is trained, the vision tower is kept",
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    text_types=("qwen2_5_vl_text", "qwen2_5_vl"),  # published files have the keys of the text beside those of the tower
    towers={"vision_config": ("model.visual.*",)},
    tied=False,
    defaults={"rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1_000_000.0},  # of transformers
    published_names=({"model.language_model.": "model.", "model.visual.": "visual."},),
)
