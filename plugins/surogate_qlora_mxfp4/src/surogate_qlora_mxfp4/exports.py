"""The export format `mxfp4`: experts in MXFP4, all else as it is, as gpt-oss is published."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.api import ConfigError, ExportContext, ExportFormatDef, ExportTensor, HFTensor, Rewritten

from . import files
from .options import Mxfp4WeightOptions

if TYPE_CHECKING:
    from torch import Tensor

_SERVED = "gpt_oss"
"""The model_type of which transformers and vLLM read MXFP4 in this form."""
_PIECE = 1 << 18
"""Weights that are quantized at a time, about."""


def _rewritten(context: ExportContext) -> Mapping[str, HFTensor]:
    """Return the tensors that are stored."""
    linear = context.linear()
    return {**linear.matrices, **linear.stacks}


def _check(context: ExportContext) -> None:
    for tensor in _rewritten(context).values():
        try:
            files.shapes(tensor)
        except ConfigError as error:
            raise ConfigError(f"mxfp4: {tensor.name} {error} Use --format hf.") from None
    if context.config.get("model_type") != _SERVED:
        context.notice(f"transformers and vLLM read MXFP4 in this form of {_SERVED} alone. Runs of surogate read it.")


def _stored(stored: HFTensor, tensor: ExportTensor, dtype: str) -> Mapping[str, Tensor]:
    import torch

    from surogate_core.reference.rounding import TORCH_DTYPES

    from .reference import quantized

    held, whole = stored.matrices, None if stored.leading and tensor.by_rows else tensor[...]
    codes, scales = (torch.empty(shape, dtype=torch.uint8) for shape in files.shapes(stored))
    flat = codes.view(-1, held.shape[-1] // 2), scales.view(-1, scales.shape[-1])
    count = stored.shape[0] if stored.leading else 1
    height, step = len(flat[0]) // count, max(1, _PIECE // held.shape[-1])
    for i in range(count):
        if whole is None:
            rows = stored.load(tensor[i : i + 1])
        else:
            rows = stored.load(whole[i : i + 1]) if stored.leading else whole
        for at in range(0, height, step):
            found = quantized(rows[at : at + step].to(TORCH_DTYPES[dtype]))
            for target, piece in zip(flat, found, strict=True):
                target[i * height + at :][: len(piece)] = piece
    return {stored.name + files.BLOCKS: codes, stored.name + files.SCALES: scales}


def _write(context: ExportContext, folder: Path) -> None:
    rewritten = [
        Rewritten(tensors=(name,), parts=partial(_stored, stored, context.tensors[name], context.model_dtype))
        for name, stored in _rewritten(context).items()
    ]
    options = context.options or Mxfp4WeightOptions(qlora_mxfp4=True)
    context.write_model(folder, rewritten, files.config(context.linear().others, options))


EXPORT = ExportFormatDef(
    name="mxfp4",
    summary="MXFP4: experts in 4 bits and a power of two for each 32 of a row, for vLLM and transformers",
    check=_check,
    write=_write,
    weight_format="mxfp4",
    stacks=True,
)
