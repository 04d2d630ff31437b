"""The base that an adapter was trained on, as the adapter's folder tells it: another one gives another model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surogate_core.errors import ConfigError

from ..hub.config_json import QUANTIZATION, read_config, read_json
from .facts import FILES, UNQUANTIZED, WEIGHTS

BASE = "base.json"


def write_base(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write what `facts` has of a run's base into the folder of its adapter. Nothing if the run drew its base."""
    if WEIGHTS in facts:
        told = {WEIGHTS: facts[WEIGHTS], FILES: facts[FILES]}
        (folder / BASE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def is_other_base(folder: Path, base_dir: Path) -> bool:
    """Return whether a base has other weights than the one that the adapter in `folder` was trained on.

    False if the folder does not tell, as of other programs, and for weights stored in another form, quantized or not,
    which cannot be compared.
    """
    if not (folder / BASE).is_file():
        return False
    from .base import weights_identity  # imports torch

    trained, quantized = read_json(folder / BASE, "Save the adapter again."), read_config(base_dir).get(QUANTIZATION)
    form = str(quantized.get("quant_method")) if isinstance(quantized, Mapping) else UNQUANTIZED
    return trained.get(FILES) == form and trained.get(WEIGHTS) != weights_identity(base_dir)


def check_base(folder: Path, base_dir: Path, notice: Callable[[str], None] | None) -> None:
    """Tell `notice` that the base is another than the adapter's. Raise ConfigError without one: nobody has named it."""
    if not is_other_base(folder, base_dir):
        return
    if notice is None:
        raise ConfigError(
            f"{base_dir}: has other weights than the base that {folder} was trained on ({BASE}). Restore them, or name "
            f"the folder to use it all the same: --base {base_dir}."
        )
    notice(f"--base {base_dir}: has other weights than the base that {folder} was trained on")
