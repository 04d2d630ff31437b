"""MXFP4 in checkpoints, as those of gpt-oss are published.

A stack of experts `x` is `x_blocks` (uint8 [E, N, K / 32, 16]) and `x_scales` (uint8 [E, N, K / 32]). Its rows are the
rows of products: `x` itself is [E, K, N] in transformers, which transposes what it decodes. A matrix is held alike,
without the first dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError, HFTensor

from .ops import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from .options import Mxfp4WeightOptions

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_BYTES = BLOCK // 2


def matches(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == METHOD


def check(config: Mapping[str, Any], options: Mxfp4WeightOptions) -> None:
    """Accept every config of the method, which has no key that changes what is stored."""


def kept(config: Mapping[str, Any]) -> Sequence[str] | None:
    return config.get("modules_to_not_convert")


def parts(name: str, options: Mxfp4WeightOptions) -> Sequence[str]:
    return name + BLOCKS, name + SCALES


def shapes(tensor: HFTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the blocks and the scales of a matrix, or of a stack of them.

    Raises ConfigError if it is neither, or its columns are no whole blocks.
    """
    held = tensor.matrices
    if held.layout is not None or len(held.shape) < 2:
        what = f"{list(tensor.shape)}" if held.layout is None else f"{held.layout}"
        raise ConfigError(f"is {what}; matrices, and stacks of experts, are in MXFP4.")
    *rows, columns = held.shape
    if columns % BLOCK:
        raise ConfigError(f"has {columns} columns, which is no multiple of {BLOCK}, the block of MXFP4.")
    return (*rows, columns // BLOCK, _BYTES), (*rows, columns // BLOCK)


def refuse_inexact(name: str, codes: Tensor, scales: Tensor) -> None:
    """Raise ConfigError unless bf16 holds all numbers of the blocks exactly: codes [..., 16] and scales [...].

    It does with the scales 2 to 252, and where a block is all zeros with any scale but 255, which is NaN.
    """
    from .reference import LEAST, MOST, NAN

    odd = (scales < LEAST) | (scales > MOST)
    if odd.any():
        odd &= ((codes & 0x77) != 0).any(-1) | (scales == NAN)
    if count := int(odd.sum()):
        at = odd.nonzero()[0].tolist()
        raise ConfigError(
            f"{name} has the scale code {int(scales[tuple(at)])} at {at} ({count} such blocks): bf16 holds the numbers "
            f"of codes {LEAST} to {MOST} exactly. Use another checkpoint."
        )


def load(tensor: HFTensor, given: Mapping[str, Tensor], options: Mxfp4WeightOptions) -> Sequence[Tensor]:
    import torch

    names, wanted = parts(tensor.name, options), shapes(tensor)
    for name, shape in zip(names, wanted, strict=True):
        found = given[name]
        if found.dtype != torch.uint8 or tuple(found.shape) != shape:
            raise ConfigError(f"{name} must be torch.uint8 {list(shape)}, found {found.dtype} {list(found.shape)}.")
    codes, scales = (given[name] for name in names)
    refuse_inexact(names[1], codes, scales)
    rows = prod(tensor.shape[:-1])
    return codes.reshape(rows, -1), scales.reshape(rows, -1)


def save(tensor: HFTensor, states: Sequence[Tensor], dtype: str, options: Mxfp4WeightOptions) -> Mapping[str, Tensor]:
    found = [state.reshape(shape) for state, shape in zip(states, shapes(tensor), strict=False)]
    return dict(zip(parts(tensor.name, options), found, strict=True))


def config(kept: Sequence[str], options: Mxfp4WeightOptions) -> Mapping[str, Any]:
    return {"quant_method": METHOD, "modules_to_not_convert": sorted(kept)}
