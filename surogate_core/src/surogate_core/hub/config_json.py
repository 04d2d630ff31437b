"""Reads a model's `config.json`. Imports nothing heavy: `surogate plan` needs no torch, weights or tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError

QUANTIZATION = "quantization_config"
"""Key of a checkpoint whose weights are stored quantized. `read_config` returns it only if it is not null."""


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


def refused_quantized(model_dir: Path, why: str) -> ConfigError:
    """Return the error for a model whose weights are stored quantized. `why`: a sentence, without its full stop."""
    return ConfigError(
        f"{model_dir / 'config.json'}: {QUANTIZATION}: the weights are stored quantized. {why}: use the original "
        "checkpoint of this model, in bf16 or fp32."
    )


def read_json(path: Path, if_missing: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError naming the file; if it is missing, with `if_missing`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. {if_missing}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}. Download it again.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must contain a JSON object, contains {type(content).__name__}. Download it again.")
    return content
