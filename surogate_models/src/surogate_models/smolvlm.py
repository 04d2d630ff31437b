"""SmolVLM 1 and 2 and Idefics3, text: a Llama in a class with a vision tower, which is kept."""

from __future__ import annotations

from surogate_core.api import ModelDef

from .llama import LLAMA
from .outer import outer


def _around_llama(name: str, models: str, architecture: str) -> ModelDef:
    return outer(
        LLAMA,
        name=name,
        summary=f"{models}: the text is trained, the vision tower is kept",
        architecture=architecture,
        model_type=name,
        text_types=("llama",),
        towers={"vision_config": ("model.vision_model.*", "model.connector.*")},
        tied=False,
        place="model.text_model.",
        defaults={"rms_norm_eps": 1e-5},  # of both configs in transformers
    )


IDEFICS3 = _around_llama("idefics3", "Idefics3 and SmolVLM 1", "Idefics3ForConditionalGeneration")
SMOLVLM = _around_llama("smolvlm", "SmolVLM2", "SmolVLMForConditionalGeneration")
