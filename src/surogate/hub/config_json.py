"""Reads a model's `config.json`. Imports nothing heavy: `surogate plan` needs no torch, weights or tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surogate_core.api.json_object import read_json_object
from surogate_core.errors import ConfigError

QUANTIZATION = "quantization_config"
"""Key of a checkpoint whose weights are stored quantized. `read_config` returns it only if it is not null."""

_TEXT = "text_config"


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a model directory.

    Raises ConfigError if it is missing, unreadable or not a JSON object.
    """
    path = model_dir / "config.json"
    remedy = f"Name a directory with a Hugging Face model ({model_dir} has no config.json)."
    if (model_dir / "adapter_config.json").is_file():
        remedy = f"{model_dir} holds an adapter: name it in adapter_path, and its base in model."
    config = read_json(path, remedy)
    quantization = config.get(QUANTIZATION)
    if quantization is None:
        return {key: value for key, value in config.items() if key != QUANTIZATION}
    if not isinstance(quantization, dict):
        raise ConfigError(f"{path}: {QUANTIZATION} must be an object. Download it again.")
    return config


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a parsed config.json says of the language model: all of it, or `text_config` of an outer class."""
    part = config.get(_TEXT)
    return part if isinstance(part, Mapping) else config


def with_text_part(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed config.json with `text` in place of its `text_part`."""
    return {**config, _TEXT: dict(text)} if isinstance(config.get(_TEXT), Mapping) else dict(text)


def refused_quantized(model_dir: Path, why: str) -> ConfigError:
    """Return the error for a model whose weights are stored quantized. `why`: a sentence, without its full stop."""
    return ConfigError(
        f"{model_dir / 'config.json'}: {QUANTIZATION}: the weights are stored quantized. {why}: use the original "
        "checkpoint of this model, in bf16 or fp32."
    )


def read_json(path: Path, if_missing: str) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises ConfigError naming the file; if it is missing, with
    `if_missing`."""
    return read_json_object(path, "Download it again.", if_missing)
