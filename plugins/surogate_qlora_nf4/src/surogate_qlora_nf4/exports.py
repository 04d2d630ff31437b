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
    """Return the parts of a matrix, which is quantized as a whole: its scales are quantized together."""
    from surogate_core.reference.rounding import TORCH_DTYPES

    from .reference import nf4_quantize

    weight = tensor[...].to(TORCH_DTYPES[dtype])
    block, double = options.qlora_bnb_block_size, options.qlora_bnb_double_quant
    states = nf4_quantize(weight, rows=(len(weight),), block=block, double=double)
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
    weight_format="nf4",
)
