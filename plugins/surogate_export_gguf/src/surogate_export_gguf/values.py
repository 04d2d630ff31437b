"""Numbers as the file stores them: which type a tensor gets, and rows of it as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType, quants
from numpy.typing import NDArray
from torch import Tensor

from surogate_core.api import ConfigError

from .tensors import Target

Type = GGMLQuantizationType
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Form:
    """A form of the matrices.

    type       of the matrices of blocks
    file_type  its number in the file
    outer      type of embedding and head
    experts    type of the matrices of experts, if it is another
    """

    type: Type
    file_type: LlamaFileType
    outer: Type
    experts: Type | None = None


FORMS = {
    "bf16": Form(Type.BF16, LlamaFileType.MOSTLY_BF16, Type.BF16),
    "f16": Form(Type.F16, LlamaFileType.MOSTLY_F16, Type.F16),
    "f32": Form(Type.F32, LlamaFileType.ALL_F32, Type.F32),
    "q8_0": Form(Type.Q8_0, LlamaFileType.MOSTLY_Q8_0, Type.Q8_0),
    "q5_0": Form(Type.Q5_0, LlamaFileType.MOSTLY_Q5_0, Type.Q8_0),
    "q5_1": Form(Type.Q5_1, LlamaFileType.MOSTLY_Q5_1, Type.Q8_0),
    "q4_0": Form(Type.Q4_0, LlamaFileType.MOSTLY_Q4_0, Type.Q8_0),
    "q4_1": Form(Type.Q4_1, LlamaFileType.MOSTLY_Q4_1, Type.Q8_0),
    "mxfp4": Form(Type.BF16, LlamaFileType.MOSTLY_MXFP4_MOE, Type.BF16, experts=Type.MXFP4),
}
"""The types that the package `gguf` quantizes, as `gguf:NAME`. The first is the default."""

OUTER = ("token_embd.weight", "output.weight")
PRECISE = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "_exps.bias", "ssm_conv1d.weight")
EXPERTS = "_exps.weight"
LARGEST_F16 = 65504.0
PIECE = 1 << 18
"""Numbers that are quantized at a time, about: in fp32 they fit the cache of a core. The package would take 16 rows,
whose ops are so short that threads wait for each other."""


def type_of(target: Target, form: Form) -> Type:
    """Return the type of a tensor. Rows that blocks do not divide are in F16; vectors, routers, convolutions in F32."""
    if len(target.shape) == 1 or target.name.endswith(PRECISE):
        return Type.F32
    wanted = form.outer if target.name in OUTER else form.type
    if form.experts is not None and target.name.endswith(EXPERTS):
        wanted = form.experts
    return Type.F16 if target.shape[-1] % GGML_QUANT_SIZES[wanted][0] else wanted


def bytes_of(target: Target, kind: Type) -> int:
    """Return how many bytes a tensor has in the file."""
    block, size = GGML_QUANT_SIZES[kind]
    return prod(target.shape) // block * size


def paired(x: Tensor, heads: int) -> Tensor:
    """Put row i and row i + half of each head, which RoPE rotates together, next to each other."""
    half = x.shape[0] // heads // 2
    return x.reshape(heads, 2, half, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def encoded(rows: Tensor, kind: Type, offset: float, name: str) -> Bytes:
    """Return the bytes of rows of a tensor. Raises ConfigError for values that the type cannot hold."""
    if kind is Type.BF16 and rows.dtype is torch.bfloat16:
        check_finite(rows, name)
        return rows.contiguous().view(torch.uint8).numpy()
    if kind in TORCH:
        x = _checked(rows, kind, offset, name)
        return x.to(TORCH[kind]).contiguous().view(torch.uint8).numpy()
    quantizer = getattr(quants, kind.name)
    block, size = GGML_QUANT_SIZES[kind]
    matrix = rows.reshape(-1, rows.shape[-1])
    found = np.empty((len(matrix), matrix.shape[1] // block * size), dtype=np.uint8)
    step = max(1, PIECE // matrix.shape[1])
    for at in range(0, len(matrix), step):
        x = _checked(matrix[at : at + step], kind, offset, name)
        found[at : at + step] = quantizer.quantize_rows(x.contiguous().numpy())
    return found


def _checked(rows: Tensor, kind: Type, offset: float, name: str) -> Tensor:
    """Return rows in fp32. Raises ConfigError for values that the type cannot hold."""
    x = rows.to(torch.float32)
    if offset:
        x = x + offset
    largest = check_finite(x, name)
    if kind not in (Type.F32, Type.BF16) and largest > LARGEST_F16:
        reason = f"{kind.name} holds numbers up to {LARGEST_F16:.0f}, this one is {largest:.3g}"
        raise ConfigError(f"{name}: {reason}. Export with --format gguf:bf16.")
    return x


TORCH = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}


def check_finite(x: Tensor, name: str) -> float:
    """Return the largest magnitude. Raises ConfigError for NaN and inf."""
    largest = max(abs(float(bound)) for bound in x.aminmax())  # either is NaN if a number is
    if not isfinite(largest):
        raise ConfigError(f"{name} has NaN or inf. The training failed before this checkpoint: export an earlier one.")
    return largest


def odd(targets: list[Target], form: Form) -> list[str]:
    """Return the names of tensors that are in F16 because blocks do not divide their rows."""
    return [t.name for t in targets if type_of(t, form) is Type.F16 and Type.F16 not in (form.type, form.outer)]


def refuse_without_experts(targets: list[Target], form: Form, name: str) -> None:
    """Raise ConfigError for a form of experts, if the model has none."""
    if form.experts is not None and not any(target.name.endswith(EXPERTS) for target in targets):
        raise ConfigError(f"gguf:{name}: is for models with experts, whose other matrices stay in BF16. Use gguf:q4_0.")
