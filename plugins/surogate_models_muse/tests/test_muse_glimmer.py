"""Sizes of Muse Glimmer. It is trained in `tests/end_to_end/test_outer_models.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerConfig, MuseGlimmerTextConfig

from surogate_core.api import ConfigError
from surogate_models_muse.muse_glimmer import MUSE_GLIMMER

TOWER: dict[str, Any] = {"vision_config": {"model_type": "muse_glimmer_vision"}}


def dims(**text: Any) -> Any:
    return MUSE_GLIMMER.dims({**TOWER, "text_config": text})


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    assert dims() == dims(**MuseGlimmerTextConfig().to_dict())


def test_each_fourth_layer_from_the_last_sees_all_tokens_and_has_no_rope() -> None:
    d = dims(num_hidden_layers=6)
    assert d.windows == (2048, 0, 2048, 2048, 2048, 0)
    assert d.rotated == (True, False, True, True, True, False)


def test_the_tensors_are_those_of_transformers() -> None:
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(MuseGlimmerConfig())
    shapes = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    text = {name: shape for name, shape in shapes.items() if not name.startswith("model.vision_")}
    tensors = [tensor for weight in MUSE_GLIMMER.weights(dims()) for tensor in weight.tensors]
    assert {tensor.name: tuple(tensor.shape) for tensor in tensors} == text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_activation", "gelu", "must be silu (got 'gelu')"),
        ("layer_rope_theta", [0] * 51, "must be 52 times 0 or rope_theta 10000"),
        ("layer_rope_theta", [500.0] * 52, "must be 52 times 0 or rope_theta 10000"),
        ("layer_types", ["chunked_attention"] * 52, "must be 52 times full_attention or sliding_attention"),
        ("final_logit_softcapping", None, "must be a positive number (got None)"),
        ("attention_dropout", 0.1, "dropout is not supported yet; must be 0 (got 0.1)"),
    ],
)
def test_what_the_program_has_not_is_refused_by_its_key(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        dims(**{key: value})
    assert str(refused.value).startswith(f"text_config.{key}: {message}")
