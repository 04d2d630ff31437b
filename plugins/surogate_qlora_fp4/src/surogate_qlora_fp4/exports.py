"""The export format `nvfp4`: matrices in NVFP4, activations in 16 bits.

Servers stack matrices that read the same input, and take one global scale for all of a stack: vLLM the largest, with a
warning. So those matrices share a scale here, that of their largest magnitude. The types differ in names and in what
the global scale is:

modelopt            `x.weight`, `x.weight_scale`, `x.weight_scale_2`, which multiplies. Runs with `qlora_fp4: true` and
                    vLLM load it; transformers does not.
compressed-tensors  `x.weight_packed`, `x.weight_scale`, `x.weight_global_scale`, which divides: the reciprocal, rounded
                    to fp32. vLLM and transformers load it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError, ExportContext, ExportFormatDef, HFTensor, LinearModules, Rewritten

from . import files
from .ops import BLOCK
from .options import Fp4WeightOptions

if TYPE_CHECKING:
    from torch import Tensor

MODELOPT, COMPRESSED = "modelopt", "compressed-tensors"

STACKED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Matrices of a module that vLLM and SGLang stack."""

_PIECE = 1 << 18
"""Weights that are quantized at a time, about."""


def stacks(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the matrices in groups that servers stack. Matrices of other names stand alone."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        module, _, rest = name.rpartition(".")  # x.q_proj, weight
        parent, _, own = module.rpartition(".")
        stack = next((stack[0] for stack in STACKED if own in stack), own)
        found.setdefault((parent, f"{stack}.{rest}"), []).append(name)
    return [tuple(group) for group in found.values()]


def _options(context: ExportContext) -> Fp4WeightOptions:
    return context.options or Fp4WeightOptions.model_validate({"qlora_fp4": True})


def _check(context: ExportContext) -> None:
    for tensor in context.linear().matrices.values():
        if tensor.shape[1] % BLOCK:
            raise ConfigError(
                f"nvfp4: {tensor.name} has {tensor.shape[1]} columns, which is no multiple of {BLOCK}, the block of "
                "NVFP4. Use --format fp8-channel or hf."
            )


def _stored(stack: Sequence[str], context: ExportContext, stored: Mapping[str, HFTensor]) -> Mapping[str, Tensor]:
    """Return the parts of matrices with one global scale."""
    import torch

    from surogate_core.reference.rounding import TORCH_DTYPES

    from .reference import quantized

    options, dtype = _options(context), TORCH_DTYPES[context.model_dtype]
    weights = {name: context.tensors[name][...].to(dtype) for name in stack}
    amax = torch.stack([torch.stack(weight.aminmax()).abs().max() for weight in weights.values()]).max().float()
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        rows, columns = weight.shape
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scales = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn)
        step = max(1, _PIECE // columns)
        for at in range(0, rows, step):
            piece = weight[at : at + step].float()
            codes[at : at + step], scales[at : at + step], whole = quantized(piece, amax, options.qlora_four_over_six)
        states = codes, scales, whole
        if context.type == MODELOPT:
            found |= files.save(stored[name], (*states, amax), context.model_dtype, options)
        else:
            found |= packed(name, *states)
    return found


def packed(name: str, codes: Tensor, scales: Tensor, whole: Tensor) -> Mapping[str, Tensor]:
    """Return the tensors of compressed-tensors. A matrix of zeros has the global scale 1."""
    import torch

    inverse = torch.where(whole > 0, (1 / whole).clamp(max=torch.finfo(torch.float32).max), 1.0).reshape(1)
    return {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_global_scale": inverse}


def ignored(linear: LinearModules, inside: Callable[[str], str]) -> list[str]:
    """Return the modules in floating point. inside: (the end of a tower's name) -> a pattern of what it contains.

    Servers have other names before that of a tower, and other modules in it than the files.
    """
    towers = [inside(name.removeprefix("model.")) for name in linear.towers]
    return [*(name for name in linear.others if name not in linear.towers), *towers]


def packed_config(ignored: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors, which calls the scheme NVFP4A16."""
    shape = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK}
    weights = {**shape, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": "nvfp4-pack-quantized"}},
        "ignore": list(ignored),
    }


def _write(context: ExportContext, folder: Path) -> None:
    linear = context.linear()
    rewritten = [
        Rewritten(tensors=stack, parts=partial(_stored, stack, context, linear.matrices))
        for stack in stacks(linear.matrices)
    ]
    if context.type == MODELOPT:
        config = files.config(ignored(linear, lambda tower: f"*{tower}.*"), _options(context))
    else:
        config = packed_config(ignored(linear, lambda tower: rf"re:(.*\.)?{re.escape(tower)}\."))
    context.write_model(folder, rewritten, config)


NVFP4 = ExportFormatDef(
    name="nvfp4",
    summary="NVFP4: 4 bits and an FP8 scale for each 16 of a row, activations in 16 bits, for vLLM",
    types=(MODELOPT, COMPRESSED),
    check=_check,
    write=_write,
    by_matrix=True,
    weight_format="fp4",
)
