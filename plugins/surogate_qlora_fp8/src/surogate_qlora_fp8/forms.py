"""The checkpoint forms `fp8_blocks` and `fp8_tensor`: E4M3 with a scale for each block, or one for each matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import CheckpointFormDef, ConfigError, HFTensor, Part, StoredTensor

from .files import block_size, matches, scale_of

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = ("fp32", "bf16", "ue8m0")


def _has_one_scale(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "fp8" and block_size(config) is None


def _check(config: Mapping[str, Any]) -> None:
    if (experts := config.get("expert_dtype", "fp8")) != "fp8":
        raise ConfigError(f"expert_dtype is {experts!r}; only fp8 can be read.")


def _check_blocks(config: Mapping[str, Any]) -> None:
    _check(config)
    block = block_size(config)
    fits = isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    if not fits:
        raise ConfigError(f"weight_block_size is {block!r}, not the rows and columns of a block.")


def _parts(tensor: HFTensor, scales: tuple[int, ...]) -> Sequence[Part]:
    return Part(tensor.name, tensor.shape, ("e4m3",)), Part(scale_of(tensor.name), scales, _SCALES)


def _block_parts(tensor: HFTensor, config: Mapping[str, Any]) -> Sequence[Part]:
    if len(tensor.shape) != 2:
        raise ConfigError(f"is {list(tensor.shape)}; only a matrix has blocks.")
    sides = zip(tensor.shape, block_size(config), strict=True)
    return _parts(tensor, tuple(-(-size // side) for size, side in sides))


def _read_blocks(tensor: HFTensor, parts: Mapping[str, StoredTensor], rows: range, config: Mapping[str, Any]) -> Tensor:
    from .reference import spread

    height, width = block_size(config)
    codes = parts[tensor.name][rows.start : rows.stop].float()
    scales = parts[scale_of(tensor.name)][rows.start // height : -(-rows.stop // height)].float()
    return codes.mul_(spread(scales, (len(rows), tensor.shape[1]), (height, width), rows.start % height))


def _read_tensor(tensor: HFTensor, parts: Mapping[str, StoredTensor], rows: range, config: Mapping[str, Any]) -> Tensor:
    return parts[tensor.name][rows.start : rows.stop].float().mul_(parts[scale_of(tensor.name)][...].float())


BLOCKS = CheckpointFormDef(
    name="fp8_blocks",
    summary="FP8 (E4M3) with a scale for each block of weights",
    matches=matches,
    check=_check_blocks,
    parts=_block_parts,
    read=_read_blocks,
)
TENSORS = CheckpointFormDef(
    name="fp8_tensor",
    summary="FP8 (E4M3) with one scale for each matrix",
    matches=_has_one_scale,
    check=_check,
    parts=lambda tensor, config: _parts(tensor, ()),
    read=_read_tensor,
    ignored=("*.activation_scale",),
)
