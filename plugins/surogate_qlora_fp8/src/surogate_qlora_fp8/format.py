"""The weight format `fp8`: E4M3 with a scale for each square of weights, as fine-grained FP8 checkpoints have it."""

from __future__ import annotations

from surogate_core.api import CheckpointForm, WeightFormatDef

from . import files
from .ops import STORAGE
from .options import Fp8WeightOptions

FP8 = WeightFormatDef(
    name="fp8",
    summary="frozen weights in E4M3 with a scale for each square of weights",
    options=Fp8WeightOptions,
    key="qlora_fp8",
    bits=8.0,
    quantize=STORAGE.quantize,
    dequantize=STORAGE.dequantize,
    checkpoints=CheckpointForm(
        matches=files.matches,
        check=files.check,
        kept=files.kept,
        parts=files.parts,
        load=files.load,
        save=files.save,
        config=files.config,
        notice=files.notice,
    ),
    copies=STORAGE.copies,
)
