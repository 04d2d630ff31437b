"""The argument of an export format for the folder of a model, without the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from surogate_core.api import ExportContext, LinearModules


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    name  in the file
    file  the open file
    """

    name: str
    file: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> torch.dtype:
        return self[:0].dtype

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        whole: Tensor = self.file.get_tensor(self.name)
        return whole if rows is ... else whole[rows]


def nothing(*args: Any) -> None:
    """Do nothing."""


def no_modules() -> LinearModules:
    """Return no modules: formats of one file need none."""
    return LinearModules(matrices={}, others=())


def context_of(folder: Path, kind: str, notice: Callable[[str], None] = nothing, **changes: Any) -> ExportContext:
    """Return the argument for a folder with `model.safetensors`."""
    config = json.loads((folder / "config.json").read_text())
    file: Any = safe_open(folder / "model.safetensors", "pt")
    names = file.keys()
    end = config["text_config"]["eos_token_id"] if "text_config" in config else config["eos_token_id"]
    given: dict[str, Any] = {
        "source": folder,
        "name": folder.name,
        "type": kind,
        "config": config,
        "folder": folder,
        "tensors": {name: Stored(name, file) for name in names},
        "linear": no_modules,
        "stops": [end],
        "turn_ends": [end],
        "threads": 2,
        "model_dtype": "bf16",
        "options": None,
        "progress": nothing,
        "notice": notice,
        "write_model": nothing,
    }
    return ExportContext(**given | changes)
