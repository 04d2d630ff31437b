"""What LoRA's ops mean, in torch: sums in fp32 (fp64 of fp64), rounded once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from surogate_core.reference.ops import up
from surogate_core.reference.rounding import TORCH_DTYPES


def lora_add(base: Tensor, *branches: Tensor, columns: Sequence[int], scale: float) -> Tensor:
    """base, with scale * branch added to the columns from each one's first on."""
    y = base.clone()
    for column, branch in zip(columns, branches, strict=True):
        part = slice(column, column + branch.shape[1])
        y[:, part] = (up(base[:, part]) + scale * up(branch)).to(base.dtype)
    return y


def lora_slice(x: Tensor, *, column: int, width: int, scale: float, dtype: str) -> Tensor:
    """scale * x[:, column : column + width]."""
    return (scale * up(x[:, column : column + width])).to(TORCH_DTYPES[dtype])
