"""FP8 in checkpoints: a matrix `w` is `w` (E4M3) and `w_scale_inv`, which multiplies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError, HFTensor

from .ops import TILES

if TYPE_CHECKING:
    from torch import Tensor

    from .options import Fp8WeightOptions


DEFAULT_BLOCK = [128, 128]
"""`weight_block_size` of a config without the key."""


def block_size(config: Mapping[str, Any]) -> Any:
    """Return the rows and columns that share a scale, as config.json has them. None: a matrix has one scale."""
    return config.get("weight_block_size", DEFAULT_BLOCK)


def scale_of(name: str) -> str:
    return f"{name}_scale_inv"


def matches(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "fp8" and block_size(config) is not None


def check(config: Mapping[str, Any], options: Fp8WeightOptions) -> None:
    shape, tile = block_size(config), options.qlora_block_size
    if shape != [tile, tile]:
        if isinstance(shape, list) and shape in ([64, 64], [128, 128], [256, 256]):
            raise ConfigError(f"stored in squares of {shape[0]}, not {tile}. Set qlora_block_size: {shape[0]}.")
        raise ConfigError(f"weight_block_size is {shape}; only squares of 64, 128 or 256 can be read.")


def kept(config: Mapping[str, Any]) -> Sequence[str] | None:
    return config.get("modules_to_not_convert")


def parts(name: str, options: Fp8WeightOptions) -> Sequence[str]:
    return name, scale_of(name)


def load(tensor: HFTensor, given: Mapping[str, Tensor], options: Fp8WeightOptions) -> Sequence[Tensor]:
    import torch

    codes, scales = given[tensor.name], given[scale_of(tensor.name)]
    if codes.dtype != torch.float8_e4m3fn or tuple(codes.shape) != tensor.shape:
        raise ConfigError(f"must be E4M3 {list(tensor.shape)}, found {codes.dtype} {list(codes.shape)}.")
    wanted = tuple(-(-size // options.qlora_block_size) for size in tensor.shape)
    if tuple(scales.shape) != wanted or scales.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"its scales must be fp32 or bf16 {list(wanted)}, found {scales.dtype} {list(scales.shape)}.")
    return codes, scales.float()


def save(tensor: HFTensor, states: Sequence[Tensor], dtype: str, options: Fp8WeightOptions) -> Mapping[str, Tensor]:
    codes, scales, _ = states
    return {tensor.name: codes, scale_of(tensor.name): scales}


def config(kept: Sequence[str], options: Fp8WeightOptions) -> Mapping[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [options.qlora_block_size, options.qlora_block_size],
        "modules_to_not_convert": list(kept),
    }


def notice(tensors: Sequence[HFTensor], options: Fp8WeightOptions) -> str:
    """Name the first matrix that transformers loads wrongly, and squares with which it loads all of them."""
    wrong = next((tensor for tensor in tensors if not _splits_evenly(tensor, options.qlora_block_size)), None)
    if wrong is None:
        return ""
    tile = next((tile for tile in reversed(TILES) if all(_splits_evenly(tensor, tile) for tensor in tensors)), None)
    remedy = "No block size avoids that" if tile is None else f"qlora_block_size: {tile} avoids that"
    return (
        f"transformers will load {wrong.name} wrongly or not at all: a side of {list(wrong.shape)} is no multiple of "
        f"qlora_block_size: {options.qlora_block_size}. {remedy}. Runs of surogate load it."
    )


def _splits_evenly(tensor: HFTensor, tile: int) -> bool:
    """Return whether transformers finds the squares of a matrix, which it takes to be all of one size."""
    return all(size <= tile or size % tile == 0 for size in tensor.shape)
