"""The compiled lora_wgrad against fp64, for any number of tokens, columns and ranks, added or written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, guarded, same_bits
from surogate_lora.gradient_kernel import LORA_WGRAD_KERNEL
from surogate_lora.ops import Place

pytestmark = pytest.mark.gpu

Branches = Sequence[tuple[int, int]]
"""Widths in dy and ranks of the branches of a product."""

Product = tuple[int, Branches]
"""Columns of x, and the branches. dy has their widths side by side."""

BLOCKS: dict[str, list[Product]] = {
    "one": [(64, [(32, 16)])],
    "less than a tile": [(8, [(24, 8)])],
    "q, k, v and o": [(256, [(512, 16), (128, 16), (128, 16)]), (512, [(256, 16)])],
    "gate, up and down": [(264, [(776, 16), (776, 16)]), (776, [(264, 16)])],
    "ranks of several sizes": [(520, [(64, 8), (296, 24), (40, 40)]), (72, [(320, 56)])],
    "more ranks than one read computes": [(320, [(384, 64), (256, 64), (256, 32)]), (256, [(320, 64)])],
}
MORE = {
    "0.6B": [
        (1024, [(2048, 16), (1024, 16), (1024, 16)]),
        (2048, [(1024, 16)]),
        (1024, [(3072, 16), (3072, 16)]),
        (3072, [(1024, 16)]),
    ],
    "8B, gate and up": [(4096, [(12288, 16), (12288, 16)])],
}


def block(name: str, tokens: int, dtype: str, accumulates: bool) -> Op:
    """Return the op of a block: all A of a product, one above the other, then its B, on the diagonal."""
    ins: list[Value] = []
    shapes, places = [], []
    for columns, branches in (BLOCKS | MORE)[name]:
        widths, ranks = zip(*branches, strict=True)
        of_dy, of_x = len(ins), len(ins) + 2
        for width in (sum(widths), sum(ranks), sum(ranks), columns):
            ins.append(Value(name=f"in{len(ins)}", shape=(tokens, width), dtype="bf16", role="act"))
        starts = zip((0, *accumulate(widths)), (0, *accumulate(ranks)), strict=True)
        for (width, rank), (column, first) in zip(branches, starts, strict=False):
            shapes += [(width, rank), (rank, columns)]
            places += [Place(of_dy // 2, column, first, 0.3), Place(of_x // 2, first, 0, 1.0)]
    outs = [Value(name=f"out{i}", shape=shape, dtype=dtype, role="act") for i, shape in enumerate(shapes)]
    attrs = {"shapes": tuple(shapes), "places": tuple(places), "dtypes": (dtype,) * len(shapes)}
    adding = frozenset(range(0, len(outs), 2) if accumulates else ())
    return Op("lora_wgrad", tuple(ins), tuple(outs), attrs, accumulate=adding)


def check(name: str, tokens: int, dtype: str = "fp32", accumulates: bool = False) -> list[Tensor]:
    op = block(name, tokens, dtype, accumulates)
    contents = {v: torch.randn(v.shape).to(torch.bfloat16) for v in op.ins}
    before = {op.outs[i]: torch.randn(op.outs[i].shape) for i in op.accumulate}
    found = run_kernel([LORA_WGRAD_KERNEL], op, contents | before)
    for i, (out, at) in enumerate(zip(op.outs, op.attrs["places"], strict=True)):
        dy, x = (contents[v].cuda().double() for v in op.ins[2 * at.whole : 2 * at.whole + 2])
        dy, x = dy[:, at.row : at.row + out.shape[0]], x[:, at.column : at.column + out.shape[1]]
        truth, magnitude = at.scale * dy.T @ x, at.scale * dy.abs().T @ x.abs()
        if out in before:
            truth, magnitude = truth + before[out].cuda(), magnitude + before[out].cuda().abs()
        assert_close(found[i].cuda(), truth, TORCH_DTYPES[dtype], tokens, magnitude)
    return found


@pytest.mark.parametrize("name", cases(list(BLOCKS), more=list(MORE)))
@pytest.mark.parametrize("tokens", [1, 32, 1000])
@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_match_fp64(name: str, tokens: int, accumulates: bool) -> None:
    check(name, tokens, accumulates=accumulates)


def test_gradients_are_written_in_bf16() -> None:
    check("q, k, v and o", 96, "bf16")


def test_bits_repeat_with_other_addresses() -> None:
    torch.manual_seed(1)
    first = check("gate, up and down", 4096)
    torch.manual_seed(1)
    for one, other in zip(first, check("gate, up and down", 4096), strict=True):
        assert same_bits(one, other)


def test_wrong_arguments_are_named() -> None:
    from surogate_lora import _C

    p = guarded((64,), torch.float32).pointer
    space = 1 << 40
    for arguments, message in (
        ((0, p, space, 1, 1, 1, 1, 1, 0), "lora_wgrad: table is a null pointer"),
        ((p + 4, p, space, 1, 1, 1, 1, 1, 0), "lora_wgrad: table must be aligned to 8 bytes"),
        ((p, p + 8, space, 1, 1, 1, 1, 1, 0), "lora_wgrad: workspace must be aligned to 16 bytes"),
        ((p, p, space, 33, 1, 1, 1, 1, 0), "lora_wgrad: strips must be 1 to 32, got 33"),
        ((p, p, space, 1, 0, 1, 1, 1, 0), "lora_wgrad: tiles must be positive"),
        ((p, p, space, 1, 1, 9, 1, 1, 0), "lora_wgrad: octets must be 1 to 8, got 9"),
        ((p, p, space, 1, 1, 1, 0, 1, 0), "lora_wgrad: rows must be positive"),
        ((p, p, space, 1, 3, 1, 65, 10, 0), "lora_wgrad: units must be at most 9, got 10"),
        ((p, p, 100, 1, 1, 1, 64, 2, 0), "lora_wgrad: workspace must have 16384 bytes, got 100"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.lora_wgrad(*arguments)
