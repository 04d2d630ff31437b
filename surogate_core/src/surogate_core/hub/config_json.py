"""Reads a model's `config.json`. Light: `surogate plan` needs it before torch, weights or a tokenizer are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def read_config(model_dir: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model directory.

    Raises ConfigError when it is missing, unreadable or no JSON object, and for a checkpoint that is stored quantised.
    """
    path = model_dir / "config.json"
    config = read_json(path, f"Give a directory that holds a Hugging Face model ({model_dir} holds no config.json).")
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"{path}: quantization_config: checkpoints stored quantised are not yet supported. "
            "Use the original checkpoint of this model, in bf16 or fp32."
        )
    return config


def read_json(path: Path, if_missing: str) -> dict[str, Any]:
    """A JSON object from a file; ConfigError naming the file otherwise, ending with `if_missing` when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. {if_missing}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}. Download it again.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object, holds {type(content).__name__}. Download it again.")
    return content
