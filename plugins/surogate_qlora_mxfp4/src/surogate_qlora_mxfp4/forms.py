"""The checkpoint form `mxfp4`: files in MXFP4, read in floating point by any run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from surogate_core.api import CheckpointFormDef, HFTensor, Part, StoredTensor

from . import files

if TYPE_CHECKING:
    from torch import Tensor


def _parts(tensor: HFTensor, config: Mapping[str, Any]) -> Sequence[Part]:
    blocks, scales = files.shapes(tensor)
    return (
        Part(tensor.name + files.BLOCKS, blocks, ("uint8",)),
        Part(tensor.name + files.SCALES, scales, ("ue8m0", "uint8")),
    )


def _read(tensor: HFTensor, parts: Mapping[str, StoredTensor], rows: range, config: Mapping[str, Any]) -> Tensor:
    import torch

    from .reference import decoded

    here = slice(rows.start, rows.stop)
    codes = parts[tensor.name + files.BLOCKS][here]
    scales = parts[tensor.name + files.SCALES][here].view(torch.uint8)
    files.refuse_inexact(tensor.name + files.SCALES, codes, scales)
    height = prod(scales.shape[:-1])
    return tensor.save(decoded(codes.reshape(height, -1), scales.reshape(height, -1)))


FORM = CheckpointFormDef(
    name="mxfp4",
    summary="MXFP4: 4 bits and a power of two for each 32 of a row",
    matches=files.matches,
    parts=_parts,
    read=_read,
)
