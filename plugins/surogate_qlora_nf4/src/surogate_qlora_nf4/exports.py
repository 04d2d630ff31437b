"""The export format `nf4`: matrices in NF4, as transformers loads them with bitsandbytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.api import ConfigError, ExportContext, ExportFormatDef, ExportTensor, HFTensor, Rewritten

from . import files
from .options import Nf4Options

if TYPE_CHECKING:
    from torch import Tensor


_PIECE = 1 << 18
"""Weights that are quantized at a time, about: in fp32 they fit the cache of a core."""


def _options(context: ExportContext) -> Nf4Options:
    return context.options or Nf4Options.model_validate({"qlora_bnb": True})


def _check(context: ExportContext) -> None:
    options, matrices = _options(context), context.linear().matrices
    for tensor in matrices.values():
        if tensor.shape[1] % options.qlora_bnb_block_size:
            raise ConfigError(
                f"nf4: {tensor.name} has {tensor.shape[1]} columns, which is no multiple of "
                f"{options.qlora_bnb_block_size}, the block of NF4. Use --format hf."
            )
    if line := files.notice(list(matrices.values()), options):
        context.notice(line)


def _stored(stored: HFTensor, tensor: ExportTensor, dtype: str, options: Nf4Options) -> Mapping[str, Tensor]:
    """Return the parts of a matrix. Its scales are quantized together."""
    import torch

    from surogate_core.reference.rounding import TORCH_DTYPES

    from .reference import compressed, nf4_quantize

    weight, block = tensor[...].to(TORCH_DTYPES[dtype]), options.qlora_bnb_block_size
    rows, columns = weight.shape
    codes, absmax = torch.empty(rows, columns // 2, dtype=torch.uint8), torch.empty(rows, columns // block)
    step = max(1, _PIECE // columns)
    for at in range(0, rows, step):
        piece = weight[at : at + step]
        own, scales = nf4_quantize(piece, rows=(len(piece),), block=block, double=False)
        codes[at : at + step], absmax[at : at + step] = own.view(len(piece), -1), scales.view(len(piece), -1)
    scales = absmax.view(-1)
    states = codes.view(-1), *(compressed(scales) if options.qlora_bnb_double_quant else (scales,))
    return files.save(stored, (*states, weight), dtype, options)  # the last one is of runs alone


def _write(context: ExportContext, folder: Path) -> None:
    options, linear = _options(context), context.linear()
    rewritten = [
        Rewritten(tensors=(name,), parts=partial(_stored, stored, context.tensors[name], context.model_dtype, options))
        for name, stored in linear.matrices.items()
    ]
    context.write_model(folder, rewritten, files.config(linear.others, options))


EXPORT = ExportFormatDef(
    name="nf4",
    summary="NF4 of bitsandbytes, for transformers and vLLM",
    check=_check,
    write=_write,
    by_matrix=True,
    weight_format="nf4",
)
