"""An export format for Surogate: a header in JSON and all tensors in one file"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.api import ConfigError, ExportContext, ExportFormatDef, provides

if TYPE_CHECKING:  # `surogate plugins` runs without torch
    from torch import Tensor

SUROGATE_API = {"export_formats": 1}
BYTES = {"f32": 4, "f16": 2}  # of an element, by type


def check(context: ExportContext) -> None:
    """Refuse a model that the file cannot hold. Nothing is written yet."""
    for tensor in context.tensors.values():
        if len(tensor.shape) > 4:
            raise ConfigError(
                f"acme_toy: {tensor.name} has {len(tensor.shape)} dimensions, at most 4. Use --format hf."
            )


def write(context: ExportContext, folder: Path) -> None:
    """Write the header, then one tensor after another, of which no others are in memory."""
    at, places = 0, {}
    for name, tensor in context.tensors.items():
        places[name] = {"shape": tensor.shape, "at": at}
        at += prod(tensor.shape) * BYTES[context.type]
    header = {"type": context.type, "config": context.config, "stops": context.stops, "tensors": places}
    with (folder / f"{context.name}.acme_toy").open("wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        for done, tensor in enumerate(context.tensors.values(), start=1):
            file.write(stored(tensor[...], context.type).numpy().tobytes())
            context.progress(done, len(context.tensors))


def stored(weight: Tensor, kind: str) -> Tensor:
    """Return a tensor as the file has it."""
    return weight.float() if kind == "f32" else weight.half()


surogate_export_formats = provides(
    [
        ExportFormatDef(
            name="acme_toy",
            summary="one file with a header in JSON",
            types=tuple(BYTES),
            check=check,
            write=write,
            identified_by="*.acme_toy",
        )
    ]
)
