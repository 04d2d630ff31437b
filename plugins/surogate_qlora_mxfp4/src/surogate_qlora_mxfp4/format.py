"""The weight format `mxfp4`: OCP's MXFP4 as storage, which any GPU can read."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.api import CheckpointForm, ParamInfo, WeightFormatDef

from . import files
from .ops import STORAGE
from .options import Mxfp4WeightOptions


def stores(params: Sequence[ParamInfo]) -> Sequence[ParamInfo]:
    """Return the experts, as published checkpoints hold them; of a model without experts, all matrices."""
    return [info for info in params if info.parameter] or params


LAYOUT = "e2m1, ue8m0 for 32"
"""Codes uint8 [R, K / 2] and scales uint8 [R, K / 32], powers of two: two significant bits for each number."""

MXFP4 = WeightFormatDef(
    name="mxfp4",
    summary="frozen experts in MXFP4: 4 bits and a power of two for each 32 of a row",
    options=Mxfp4WeightOptions,
    key="qlora_mxfp4",
    bits=4.25,
    layout=LAYOUT,
    quantize=STORAGE.quantize,
    dequantize=STORAGE.dequantize,
    stores=stores,
    checkpoints=CheckpointForm(
        matches=files.matches,
        check=files.check,
        kept=files.kept,
        parts=files.parts,
        stacked=True,
        load=files.load,
        save=files.save,
        config=files.config,
    ),
    copies=STORAGE.copies,
)
