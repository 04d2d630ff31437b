"""The weight format `fp4`: NVFP4 as storage, which any GPU can read. Products are in the dtype of the recipe."""

from __future__ import annotations

from surogate_core.api import CheckpointForm, WeightFormatDef

from . import files
from .ops import STORAGE
from .options import Fp4WeightOptions

LAYOUT = "e2m1, e4m3 for 16"
"""The first states: codes uint8 [R, K / 2], scales e4m3 [R, K / 16], and factors fp32 [matrices]."""

FP4 = WeightFormatDef(
    name="fp4",
    summary="frozen weights in NVFP4: 4 bits and an FP8 scale for each 16 of a row",
    options=Fp4WeightOptions,
    key="qlora_fp4",
    bits=4.5,
    layout=LAYOUT,
    quantize=STORAGE.quantize,
    dequantize=STORAGE.dequantize,
    checkpoints=CheckpointForm(
        matches=files.matches,
        check=files.check,
        kept=files.kept,
        parts=files.parts,
        ignored=files.IGNORED,
        load=files.load,
        save=files.save,
        config=files.config,
        loaded_by=("vLLM",),
    ),
    copies=STORAGE.copies,
)
