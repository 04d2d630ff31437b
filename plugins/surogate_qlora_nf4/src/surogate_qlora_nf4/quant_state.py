"""The JSON that bitsandbytes stores beside a matrix: how its codes were made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError

from .tables import BLOCKS, GROUP

if TYPE_CHECKING:
    from torch import Tensor

    from .options import Nf4Options

NAME = "quant_state.bitsandbytes__nf4"
_ORIGINAL = "Use the original checkpoint, or download this one again."
_MAX_FP32 = 3.4e38


@dataclass(frozen=True)
class QuantState:
    """offset: the mean of the scales, with double quantization."""

    block: int
    offset: float


def read_state(stored: Tensor, shape: tuple[int, ...], options: Nf4Options) -> QuantState:
    """Return the state of a matrix of this shape. Raises ConfigError, with the remedy, for one that cannot be used."""
    state = _parsed(stored)
    if state.get("quant_type") != "nf4":
        raise _wrong("quant_type", state, "only nf4 can be read")
    if state.get("shape") != list(shape):
        raise _wrong("shape", state, f"expected {list(shape)} from config.json")
    block = state.get("blocksize")
    if block not in BLOCKS:
        raise _wrong("blocksize", state, f"only {', '.join(map(str, BLOCKS))} can be read")
    if block != options.qlora_bnb_block_size:
        raise ConfigError(
            f"stored in blocks of {block}, not {options.qlora_bnb_block_size}. Set qlora_bnb_block_size: {block}."
        )
    if not options.qlora_bnb_double_quant:
        return QuantState(int(block), 0.0)
    if state.get("nested_blocksize") != GROUP:
        raise _wrong("nested_blocksize", state, f"only {GROUP} can be read")
    offset = state.get("nested_offset")
    if not isinstance(offset, float | int) or not math.isfinite(offset) or abs(offset) > _MAX_FP32:
        raise _wrong("nested_offset", state, "it must be a number of fp32")
    return QuantState(int(block), float(offset))


def _parsed(stored: Tensor) -> Mapping[str, Any]:
    import torch

    if stored.dtype != torch.uint8:
        raise ConfigError(f"its {NAME} must be bytes, found {stored.dtype}. {_ORIGINAL}")
    try:
        state = json.loads(bytes(stored.reshape(-1).tolist()))
    except (ValueError, RecursionError) as error:  # of JSON, or of its encoding
        raise ConfigError(f"its {NAME} is no JSON ({error}). {_ORIGINAL}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"its {NAME} is no JSON object, but {type(state).__name__}. {_ORIGINAL}")
    return state


def _wrong(key: str, state: Mapping[str, Any], expected: str) -> ConfigError:
    found = json.dumps(state[key])[:60] if key in state else "missing"
    return ConfigError(f"{key} in its {NAME} is {found}; {expected}. {_ORIGINAL}")
