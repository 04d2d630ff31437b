"""PiSSA (Meng et al. 2024): A and B start as the principal part of W, and the base is what remains.

    W = U S V^T    s B0 A0 = U_r S_r V_r^T    B0 = U_r (S_r / s)^1/2    A0 = (S_r / s)^1/2 V_r^T
    y = (W - s B0 A0) x + s B (A x)

The weights stay as they are, because they are loaded again at a resume, may be stored in a weight format or on another
rank, and the saved adapter is of the original model. A0 and B0 are frozen params, and y is computed as

    y = W x + s [B, -B0] ([A; A0] x)

which is an adapter of rank 2r: saved, it is a plain one, as PEFT converts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from surogate_core.api import AdapterContext, ConfigError, Value

from .options import LoraOptions

if TYPE_CHECKING:
    from torch import Tensor

DOWN, UP = ".lora_A", ".lora_B"
FIRST_DOWN, FIRST_UP = ".lora_A_first", ".lora_B_first"
"""Ends of the names of A and B, and of A0 and B0."""

_WEIGHT = ".weight"


def start(params: Mapping[str, Value], context: AdapterContext[LoraOptions]) -> None:
    """Emit what computes A, B, A0 and B0 of each projection."""
    b, options = context.builder, context.options
    for weight in context.weights:
        row = 0
        for tensor in weight.tensors:
            module, rows = tensor.name.removesuffix(_WEIGHT), tensor.rows[0]
            if module + FIRST_DOWN in params:
                stored = params[weight.param]
                outs = [params[module + end] for end in (DOWN, UP, FIRST_DOWN, FIRST_UP)]
                with b.block(stored.block):
                    b.emit(
                        "lora_principal",
                        stored,
                        outs=outs,
                        row=row,
                        rows=rows,
                        rank=options.rank_of(module),
                        scale=options.scale_of(module),
                        dtype=outs[0].dtype,
                    )
            row += rows


def check_rank(module: str, rank: int, shape: Sequence[int]) -> None:
    """Raise ConfigError unless a weight has that many singular values."""
    if rank > min(shape):
        raise ConfigError(
            f"lora_rank: {module} is {list(shape)}, which has {min(shape)} singular values, and rank {rank} is more. "
            "Set a smaller one, or another by lora_rank_pattern."
        )


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter of the original model: [A; A0] and [B, -B0] in place of the four."""
    import torch

    found = dict(tensors)
    for module in [name.removesuffix(FIRST_DOWN) for name in tensors if name.endswith(FIRST_DOWN)]:
        found[module + DOWN] = torch.cat([found[module + DOWN], found.pop(module + FIRST_DOWN)])
        found[module + UP] = torch.cat([found[module + UP], -found.pop(module + FIRST_UP)], dim=1)
    return found


def parted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `joined` was given."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(DOWN):
            found[name], found[name.removesuffix(DOWN) + FIRST_DOWN] = tensor.chunk(2)
        elif name.endswith(UP):
            found[name], first = tensor.chunk(2, dim=1)
            found[name.removesuffix(UP) + FIRST_UP] = -first
    return found
