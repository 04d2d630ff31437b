"""NF4 in checkpoints: the tensors and the `quantization_config` that transformers writes with bitsandbytes.

A matrix `w` is `w` (codes, uint8 [size / 2, 1]), `w.absmax`, `w.quant_map`, `w.quant_state.bitsandbytes__nf4` (JSON),
and with double quantization `w.nested_absmax` and `w.nested_quant_map`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError, HFTensor

from .quant_state import NAME, read_state
from .tables import GROUP, LEVELS, absmax_map

if TYPE_CHECKING:
    from torch import Tensor

    from .options import Nf4Options

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_TOLERANCE = 2e-7
"""Relative difference of maps: that of bitsandbytes depends on the CPU, in the last bit."""


def matches(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "bitsandbytes"


def check(config: Mapping[str, Any], options: Nf4Options) -> None:
    if not config.get("load_in_4bit") or config.get("bnb_4bit_quant_type") != "nf4":
        raise ConfigError("stored by bitsandbytes, but not in NF4. Use the original checkpoint.")
    if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        raise ConfigError(
            f"bnb_4bit_quant_storage is {config['bnb_4bit_quant_storage']}; only uint8 can be read. Use the original "
            "checkpoint."
        )
    double = bool(config.get("bnb_4bit_use_double_quant", False))
    if double != options.qlora_bnb_double_quant:
        raise ConfigError(
            f"stored {'with' if double else 'without'} double quantization. Set qlora_bnb_double_quant: "
            f"{str(double).lower()}."
        )


def kept(config: Mapping[str, Any]) -> Sequence[str] | None:
    return config.get("llm_int8_skip_modules")


def parts(name: str, options: Nf4Options) -> Sequence[str]:
    nested = ("nested_absmax", "nested_quant_map") if options.qlora_bnb_double_quant else ()
    return (name, *(f"{name}.{part}" for part in ("absmax", "quant_map", NAME, *nested)))


def load(tensor: HFTensor, given: Mapping[str, Tensor], options: Nf4Options) -> Sequence[Tensor]:
    import torch

    name, size = tensor.name, tensor.shape[0] * tensor.shape[1]
    state = read_state(given[f"{name}.{NAME}"], tensor.shape, options)
    codes, absmax = given[name].reshape(-1), given[f"{name}.absmax"]
    _check("codes", codes, torch.uint8, size // 2)
    _check_map(given[f"{name}.quant_map"], LEVELS)
    if not options.qlora_bnb_double_quant:
        _check("absmax", absmax, torch.float32, size // state.block)
        return codes, absmax
    nested = given[f"{name}.nested_absmax"]
    _check("absmax", absmax, torch.uint8, size // state.block)
    _check("nested_absmax", nested, torch.float32, -(-(size // state.block) // GROUP))
    _check_map(given[f"{name}.nested_quant_map"], absmax_map())
    return codes, absmax, nested, torch.tensor([state.offset], dtype=torch.float32)


def save(tensor: HFTensor, states: Sequence[Tensor], dtype: str, options: Nf4Options) -> Mapping[str, Tensor]:
    import torch

    name, (codes, absmax, *double, _) = tensor.name, states
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": options.qlora_bnb_block_size,
        "dtype": _DTYPES[dtype],
        "shape": list(tensor.shape),
    }
    found = {name: codes.view(-1, 1), f"{name}.absmax": absmax, f"{name}.quant_map": torch.tensor(LEVELS)}
    if double:
        nested, offset = double
        state |= {"nested_blocksize": GROUP, "nested_dtype": "float32", "nested_offset": float(offset)}
        found |= {f"{name}.nested_absmax": nested, f"{name}.nested_quant_map": torch.tensor(absmax_map())}
    return found | {f"{name}.{NAME}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def config(kept: Sequence[str], options: Nf4Options) -> Mapping[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": options.qlora_bnb_double_quant,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(kept),
    }


def notice(tensors: Sequence[HFTensor], options: Nf4Options) -> str:
    """Return what to tell about a checkpoint with experts, which are linear modules of their own in transformers 4."""
    if not any(".experts." in tensor.name for tensor in tensors):
        return ""
    return (
        "transformers 5 holds the experts of a layer in one tensor, and does not load them in this form. A run "
        "of this checkpoint with qlora_bnb: true does."
    )


def _check(what: str, tensor: Tensor, dtype: Any, size: int) -> None:
    if tensor.dtype != dtype or tensor.numel() != size:
        raise ConfigError(f"{what} must be {size} elements of {dtype}, found {tensor.numel()} of {tensor.dtype}.")


def _check_map(found: Tensor, expected: Sequence[float]) -> None:
    import torch

    wanted = torch.tensor(expected)
    if found.shape != wanted.shape or not torch.allclose(found.float(), wanted, rtol=_TOLERANCE, atol=0):
        raise ConfigError("its map of codes is not that of bitsandbytes. Use the original checkpoint.")
