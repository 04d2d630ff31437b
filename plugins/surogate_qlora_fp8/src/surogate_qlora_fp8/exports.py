"""The export formats `fp8-blocks` and `fp8-channel`: matrices in E4M3 with a scale for each block, or for each row."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api import (
    ConfigError,
    ExportContext,
    ExportFormatDef,
    ExportTensor,
    HFTensor,
    LinearModules,
    Rewritten,
)

from . import files
from .options import Fp8WeightOptions

if TYPE_CHECKING:
    from torch import Tensor

FUSED = {
    "q_proj": "k_proj and v_proj",
    "k_proj": "v_proj",
    "gate_proj": "up_proj",
    "w1": "w3",
    "q_a_proj": "kv_a_proj_with_mqa",
    "in_proj_qkv": "in_proj_z",
}
"""Matrices that vLLM stacks, and what it puts below them. A block may not lie in two of them."""

_PIECE = 1 << 18
"""Weights that are quantized at a time, about: in fp32 they fit the cache of a core."""

CHANNEL_MULTIPLE = 16
"""Rows and columns of matrices whose products in FP8 are fast on NVIDIA GPUs are multiples of this."""


def rows_at_a_time(columns: int, multiple: int = 1) -> int:
    return max(1, _PIECE // max(1, columns) // multiple) * multiple


# -------------------------------------------------------------------------------------------------------------- blocks


def _options(context: ExportContext) -> Fp8WeightOptions:
    return context.options or Fp8WeightOptions.model_validate({"qlora_fp8": True})


def _check_blocks(context: ExportContext) -> None:
    options, matrices = _options(context), context.linear().matrices
    if context.options is None:  # `surogate quantize` also writes for runs, which read all sizes
        for tensor in matrices.values():
            _refuse_cut_blocks(tensor, options.qlora_block_size)
    if line := files.notice(list(matrices.values()), options):
        context.notice(line)


def _refuse_cut_blocks(tensor: HFTensor, side: int) -> None:
    rows, columns = tensor.shape
    if columns % side:
        raise ConfigError(
            f"fp8-blocks: {tensor.name} has {columns} columns, no multiple of {side}, which servers need. "
            "Use --format fp8-channel."
        )
    below = FUSED.get(tensor.name.split(".")[-2], "")
    if below and rows % side:
        raise ConfigError(
            f"fp8-blocks: {tensor.name} has {rows} rows, no multiple of {side}, so vLLM cannot stack {below} below it. "
            "Use --format fp8-channel."
        )


def _blocks(stored: HFTensor, tensor: ExportTensor, dtype: str, options: Fp8WeightOptions) -> Mapping[str, Tensor]:
    import torch

    from surogate_core.reference.rounding import TORCH_DTYPES

    from .reference import fp8_tile_quantize

    weight, tile = tensor[...].to(TORCH_DTYPES[dtype]), options.qlora_block_size
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales, step = [], rows_at_a_time(weight.shape[1], tile)
    for at in range(0, len(weight), step):
        pieces = weight[at : at + step].split(max(1, _PIECE // step // tile) * tile, dim=1)
        found = [fp8_tile_quantize(piece, rows=(len(piece),), tile=tile) for piece in pieces]
        codes[at : at + step], own = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
        scales.append(own)
    return files.save(stored, (codes, torch.cat(scales), weight), dtype, options)  # the last one is of runs alone


def _write_blocks(context: ExportContext, folder: Path) -> None:
    options, linear = _options(context), context.linear()
    rewritten = [
        Rewritten(tensors=(name,), parts=partial(_blocks, stored, context.tensors[name], context.model_dtype, options))
        for name, stored in linear.matrices.items()
    ]
    context.write_model(folder, rewritten, files.config(linear.others, options))


BLOCKS = ExportFormatDef(
    name="fp8-blocks",
    summary="FP8 (E4M3) with a scale for each block of 128 x 128, for vLLM, SGLang and transformers",
    check=_check_blocks,
    write=_write_blocks,
    by_matrix=True,
    weight_format="fp8",
)


# ------------------------------------------------------------------------------------------------------------- channels


def channel_config(linear: LinearModules) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors, which calls the scheme FP8_DYNAMIC."""
    ignored = [name for name in linear.others if name not in linear.towers]
    # Servers have other names before that of a tower, and other modules in it than the files.
    inside = [rf"re:(.*\.)?{re.escape(name.removeprefix('model.'))}\." for name in linear.towers]
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": "float-quantized"}},
        "ignore": [*ignored, *inside],
    }


def _check_channel(context: ExportContext) -> None:
    for tensor in context.linear().matrices.values():
        if any(side % CHANNEL_MULTIPLE for side in tensor.shape):
            raise ConfigError(
                f"fp8-channel: {tensor.name} is {list(tensor.shape)}; servers need sides that are multiples of "
                f"{CHANNEL_MULTIPLE}. Use --format hf."
            )


def _channels(tensor: ExportTensor) -> Mapping[str, Tensor]:
    import torch

    from .reference import fp8_channel_quantize

    weight = tensor[...]
    codes, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(len(weight), 1)
    step = rows_at_a_time(weight.shape[1])
    for at in range(0, len(weight), step):
        codes[at : at + step], scales[at : at + step] = fp8_channel_quantize(weight[at : at + step])
    return {tensor.name: codes, f"{tensor.name}_scale": scales}


def _write_channel(context: ExportContext, folder: Path) -> None:
    linear = context.linear()
    rewritten = [
        Rewritten(tensors=(name,), parts=partial(_channels, context.tensors[name])) for name in linear.matrices
    ]
    context.write_model(folder, rewritten, channel_config(linear))


CHANNEL = ExportFormatDef(
    name="fp8-channel",
    summary="FP8 (E4M3) with a scale for each row, activations rounded per token, for vLLM and SGLang",
    check=_check_channel,
    write=_write_channel,
    by_matrix=True,
)
