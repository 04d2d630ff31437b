"""Parts of the tests of weight formats: weights, and what holds for the ops of every `MatrixStorage`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import KernelDef, OpDef, Value
from surogate_core.reference.ops import load
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_op
from surogate_core.testing.kernels import assert_same_values, same_bits
from surogate_core.testing.ops import check_op

Shape = tuple[tuple[int, ...], int]
"""Rows of each matrix, and columns."""


def normal_weight(rows: int, columns: int, seed: int = 0, dtype: str = "fp32") -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(rows, columns, generator=gen)).to(TORCH_DTYPES[dtype])


def uneven_weight(rows: Sequence[int], columns: int, dtype: str) -> Tensor:
    """Rows of different magnitudes, a row of zeros and one with an outlier."""
    gen = torch.Generator().manual_seed(sum(rows) * columns)
    w = torch.randn(sum(rows), columns, generator=gen) * torch.logspace(-3, 1, sum(rows))[:, None]
    w[len(w) // 2, 7] = 50
    if len(w) > 1:
        w[len(w) // 3] = 0
    return w.to(TORCH_DTYPES[dtype])


def param(*shape: int, dtype: str = "bf16") -> Value:
    return Value(name="blocks.0.qkv", shape=shape, dtype=dtype, role="param")


def decibels(w: Tensor, back: Tensor) -> float:
    """Return the ratio of signal to noise of a weight that was stored."""
    ratio = w.double().square().sum() / (w.double() - back.double()).square().sum()
    return 10 * float(ratio.log10())


def check_copies(ops: Sequence[OpDef], writing: Mapping[str, Any], reading: Mapping[str, Any]) -> None:
    """Check that references copy two matrices to E4M3 with one scale, which maps the largest element to 448."""
    quantize, dequantize, measure, to_e4m3 = ops
    rows = (16, 32)
    w = normal_weight(48, 128, dtype="bf16") * torch.tensor([1.0, 3.0]).repeat_interleave(torch.tensor(rows))[:, None]
    stored = check_op(quantize, w, rows=rows, **writing)
    attrs = {"rows": rows, "dtype": "bf16", **reading}
    (back,), (amax,) = (check_op(op, *stored, **attrs) for op in (dequantize, measure))
    assert torch.equal(amax, torch.tensor([[float(part.abs().max()), 0] for part in back.split(rows)]))
    copy, scale = check_op(to_e4m3, *stored, amax, **attrs, transposed=False)
    assert copy.float().abs().max() == 448 and scale[1] == torch.tensor(448.0) / back.float().abs().max()
    assert copy[5, 7] == (back[5, 7].float() * scale[1]).to(torch.float8_e4m3fn)
    transposed, again = check_op(to_e4m3, *stored, amax, **attrs, transposed=True)
    assert same_bits(transposed, copy.T.contiguous()) and same_bits(again, scale)


def check_kernel(kernels: Sequence[KernelDef], op: OpDef, ins: Sequence[Tensor], **attrs: Any) -> list[Tensor]:
    """Check that a kernel has the bits of the reference. Return its outputs."""
    expected = load(op.reference)(*ins, **attrs)
    outs = run_op(kernels, op, ins, attrs)
    assert_same_values(outs, expected if isinstance(expected, tuple) else [expected])
    return outs


def check_copying_kernels(
    kernels: Sequence[KernelDef],
    ops: Sequence[OpDef],
    stored: Sequence[Tensor],
    attrs: Mapping[str, Any],
    factors: Iterable[float] = (1.0,),
) -> None:
    """Check that the kernels of the amax and of both copies have the bits of the references.

    Copies are also made by an amax that is multiplied by a factor: below 1 the largest codes are exceeded.
    """
    _, _, measure, to_e4m3 = ops
    (amax,) = check_kernel(kernels, measure, stored, **attrs)
    for factor in factors:
        scale = amax if factor == 1 else amax * torch.tensor([factor, 0.0])
        for transposed in (False, True):
            check_kernel(kernels, to_e4m3, [*stored, scale], **attrs, transposed=transposed)
