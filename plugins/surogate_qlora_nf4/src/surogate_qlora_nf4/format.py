"""The weight format `nf4`: how QLoRA stores a frozen base (Dettmers et al. 2023), as bitsandbytes does."""

from __future__ import annotations

from surogate_core.api import CheckpointForm, WeightFormatDef

from . import files
from .ops import STORAGE
from .options import Nf4Options

NF4 = WeightFormatDef(
    name="nf4",
    summary="frozen weights in 4-bit NormalFloat, with the bits of bitsandbytes",
    options=Nf4Options,
    key="qlora_bnb",
    bits=4.13,
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
