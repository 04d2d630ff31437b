"""NVFP4 in checkpoints, as ModelOpt writes it.

A matrix `x.weight` is `x.weight` (codes, uint8 [R, K / 2]), `x.weight_scale` (E4M3 [R, K / 16]) and `x.weight_scale_2`
(fp32, which multiplies).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError, HFTensor

from .ops import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from .options import Fp4WeightOptions

IGNORED = ("*.input_scale", "*.k_scale", "*.v_scale")
"""Scales of activations, which inference in FP4 and FP8 uses."""


def matches(config: Mapping[str, Any]) -> bool:
    return config.get("quant_method") == "modelopt"


def check(config: Mapping[str, Any], options: Fp4WeightOptions) -> None:
    algorithm = config.get("quant_algo")
    if algorithm != "NVFP4":
        raise ConfigError(f"quant_algo is {algorithm}; only NVFP4 can be read. Use the original checkpoint.")
    if config.get("group_size", BLOCK) != BLOCK:
        raise ConfigError(f"group_size is {config['group_size']}; NVFP4 has {BLOCK}. Use the original checkpoint.")


def kept(config: Mapping[str, Any]) -> Sequence[str] | None:
    return config.get("ignore")


def parts(name: str, options: Fp4WeightOptions) -> Sequence[str]:
    return name, f"{name}_scale", f"{name}_scale_2"


def load(tensor: HFTensor, given: Mapping[str, Tensor], options: Fp4WeightOptions) -> Sequence[Tensor]:
    import torch

    codes, scales, whole = (given[part] for part in parts(tensor.name, options))
    rows, columns = tensor.shape
    for found, dtype, shape in (
        (codes, torch.uint8, (rows, columns // 2)),
        (scales, torch.float8_e4m3fn, (rows, columns // BLOCK)),
    ):
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise ConfigError(f"must be {dtype} {list(shape)}, found {found.dtype} {list(found.shape)}.")
    if whole.numel() != 1:
        raise ConfigError(f"weight_scale_2 must be one number, found {list(whole.shape)}.")
    return codes, scales, whole.float().reshape(1)


def save(tensor: HFTensor, states: Sequence[Tensor], dtype: str, options: Fp4WeightOptions) -> Mapping[str, Tensor]:
    codes, scales, whole, _ = states
    found = (codes, scales, whole.reshape(()))
    return dict(zip(parts(tensor.name, options), found, strict=True))


def config(kept: Sequence[str], options: Fp4WeightOptions) -> Mapping[str, Any]:
    """Return the config of a checkpoint. Without `config_groups`, vLLM takes activations for 4 bits too, and reads an
    `input_scale` that no file has."""
    weights = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": BLOCK,
        "kv_cache_quant_algo": None,
        "ignore": list(kept),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }
