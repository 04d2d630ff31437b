"""Mistral 3: the text of a Mistral or of a Ministral 3, with a vision tower, which is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_models.api import BEFORE_LANGUAGE_MODEL, outer

from .ministral3 import MINISTRAL3
from .mistral import MISTRAL, MistralDims

_MINISTRAL3 = "ministral3"


def dims(text: Mapping[str, Any]) -> MistralDims:
    """Read the sizes of the text, which both kinds build alike."""
    model = MINISTRAL3 if text.get("model_type") == _MINISTRAL3 else MISTRAL
    return model.dims(text)


MISTRAL3 = outer(
    MISTRAL,
    name="mistral3",
    summary="Mistral Small 3.x and Ministral 3 as they are published: the vision tower is kept",
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    text_types=("mistral", _MINISTRAL3),
    towers={"vision_config": ("model.vision_tower.*", "model.multi_modal_projector.*")},
    tied=True,
    defaults={"tie_word_embeddings": False},
    published_names=(BEFORE_LANGUAGE_MODEL,),
    dims=dims,
)
