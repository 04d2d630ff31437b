"""Products of experts, bound through their KernelDefs and compared with fp64 for groups of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import KernelDef, Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, guarded, same_bits
from surogate_models_moe.kernels import grouped

pytestmark = pytest.mark.gpu

is_sm90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CUTLASS = pytest.param(
    grouped.CUTLASS, id="cutlass", marks=pytest.mark.skipif(not is_sm90, reason="the kernel needs an SM90")
)
KERNELS = pytest.mark.parametrize("kernels", [CUTLASS, pytest.param(grouped.PORTABLE, id="portable")])
KINDS = ("grouped_linear", "grouped_linear_dgrad", "grouped_linear_wgrad")

GROUPS: dict[str, tuple[Sequence[int], int, int]] = {
    # rows of each expert; rows and columns of a weight
    "one row": ([1], 8, 8),
    "uneven": ([0, 5, 130, 0, 128, 1, 0, 61, 0], 136, 72),
    "one has all": ([0, 0, 300, 0], 264, 40),
    "pairs of tiles beside each other": ([130, 0, 5], 512, 1024),
    "more experts than lanes": ([3, 0, 1, 2] * 18, 48, 136),
    "A of adapters": ([130, 0, 5, 200], 16, 520),
    "B of adapters": ([130, 0, 5, 200], 520, 16),
}
MORE: dict[str, tuple[Sequence[int], int, int]] = {
    "whole tiles": ([128, 256, 128], 256, 192),
    "widths of Qwen3-30B-A3B, up": ([i * 7 % 509 for i in range(32)], 1536, 2048),
    "widths of Qwen3-30B-A3B, down": ([i * 7 % 509 for i in range(32)], 2048, 768),
    "widths of Qwen3-30B-A3B, A of adapters": ([i * 7 % 509 for i in range(32)], 16, 2048),
    "widths of Qwen3-30B-A3B, B of adapters": ([i * 7 % 509 for i in range(32)], 1536, 16),
}
NARROW: dict[int, tuple[Sequence[int], int]] = {
    # rows of each expert and the wide side of a weight, for each narrow one
    8: ([3, 0, 1, 2] * 18 + [600], 136),
    16: ([0, 5, 130, 0, 128, 1, 0, 61, 0], 2056),
    24: ([300], 8),
    32: ([0, 130, 0, 5, 1100], 264),
}


class Product:
    """An op of `kind`, its operands, and what it computes in fp64, with the sum of the magnitudes of its terms."""

    def __init__(
        self, kind: str, sizes: tuple[Sequence[int], int, int], *, gradient: str = "fp32", accumulate: bool = False
    ) -> None:
        counts, n, k = sizes
        rows, experts = sum(counts), len(counts)
        self.bounds = torch.tensor([0, *counts]).cumsum(0)
        x, dy, w = (rows, k), (rows, n), (experts * n, k)
        a, b, d = {KINDS[0]: (x, w, dy), KINDS[1]: (dy, w, x), KINDS[2]: (dy, x, w)}[kind]
        out = gradient if kind.endswith("wgrad") else "bf16"
        self.a, self.b = Value("a", a, "bf16", "act"), Value("b", b, "bf16", "act")
        ends, self.d = Value("ends", (experts,), "int32", "act"), Value("d", d, out, "grad")
        self.op = Op(kind, (self.a, self.b, ends), (self.d,), {}, accumulate=frozenset({0} if accumulate else ()))
        self.contents: dict[Value, Tensor] = {v: torch.randn(v.shape).bfloat16() for v in (self.a, self.b)}
        self.contents[ends] = self.bounds[1:].int()
        self.length = {KINDS[0]: k, KINDS[1]: n, KINDS[2]: max(counts)}[kind]

    def run(self, kernels: Sequence[KernelDef]) -> Tensor:
        (out,) = run_kernel(kernels, self.op, self.contents)
        return out.cuda()

    def truth(self, of: Any = lambda x: x) -> Tensor:
        """Return the result in fp64 of operands after `of`."""
        a, b = (of(self.contents[v].cuda().double()) for v in (self.a, self.b))
        result = torch.zeros(self.d.shape, dtype=torch.float64, device="cuda")
        experts = len(self.bounds) - 1
        for e in range(experts):
            rows = slice(int(self.bounds[e]), int(self.bounds[e + 1]))
            if self.op.kind.endswith("wgrad"):
                result.view(experts, -1, self.d.shape[1])[e] = a[rows].T @ b[rows]
            else:
                weight = b.view(experts, -1, b.shape[1])[e]
                result[rows] = a[rows] @ (weight if self.op.kind.endswith("dgrad") else weight.T)
        return result


@KERNELS
@pytest.mark.parametrize(("kind", "gradient"), [(kind, "fp32") for kind in KINDS] + [(KINDS[2], "bf16")])
@pytest.mark.parametrize("name", cases([*GROUPS], more=[*MORE]))
def test_products_match_fp64(kernels: Sequence[KernelDef], kind: str, gradient: str, name: str) -> None:
    x = Product(kind, (GROUPS | MORE)[name], gradient=gradient)
    assert_close(x.run(kernels), x.truth(), TORCH_DTYPES[x.d.dtype], x.length, x.truth(torch.abs))


def narrow(kind: str, columns: int) -> list[tuple[Sequence[int], int, int]]:
    """Return the sizes of products of weights with few rows, or columns, as `kind` needs them."""
    counts, wide = NARROW[columns]
    return [(counts, columns, wide)] * (kind != KINDS[1]) + [(counts, wide, columns)] * (kind != KINDS[0])


@pytest.mark.parametrize(("kind", "gradient"), [(kind, "fp32") for kind in KINDS] + [(KINDS[2], "bf16")])
@pytest.mark.parametrize("columns", [*NARROW])
def test_products_of_narrow_weights_match_fp64(kind: str, gradient: str, columns: int) -> None:
    for sizes in narrow(kind, columns):
        x = Product(kind, sizes, gradient=gradient)
        assert_close(x.run(grouped.NARROW), x.truth(), TORCH_DTYPES[x.d.dtype], x.length, x.truth(torch.abs))


@pytest.mark.parametrize("columns", [*NARROW])
def test_gradients_of_narrow_weights_accumulate(columns: int) -> None:
    for sizes in narrow(KINDS[2], columns):
        x = Product(KINDS[2], sizes, accumulate=True)
        before = torch.randn(x.d.shape).cuda()
        x.contents[x.d] = before
        out = x.run(grouped.NARROW)
        assert_close(out, x.truth() + before.double(), torch.float32, x.length + 1, x.truth(torch.abs) + before.abs())


@KERNELS
def test_gradients_of_weights_accumulate_and_stay_where_an_expert_has_no_rows(kernels: Sequence[KernelDef]) -> None:
    x = Product(KINDS[2], GROUPS["uneven"], accumulate=True)
    before = torch.randn(x.d.shape).cuda()
    x.contents[x.d] = before
    out = x.run(kernels)
    assert_close(out, x.truth() + before.double(), torch.float32, x.length + 1, x.truth(torch.abs) + before.abs())
    assert same_bits(out.view(9, -1)[[0, 3, 6, 8]], before.view(9, -1)[[0, 3, 6, 8]])


@pytest.mark.parametrize(
    "kernels", [CUTLASS, *(pytest.param(getattr(grouped, k), id=k) for k in ("PORTABLE", "NARROW"))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_undefined_rows_reach_no_other_row_or_expert(kernels: Sequence[KernelDef], kind: str) -> None:
    """Tiles end within experts: what lies behind their rows is that of the next one."""
    for sizes in narrow(kind, 16) if kernels is grouped.NARROW else [GROUPS["uneven"]]:
        x = Product(kind, sizes)
        x.contents[x.a][5 + 130] = float("nan")  # the first row of the expert after the one with 130
        nan = x.run(kernels).isnan()
        if kind.endswith("wgrad"):
            assert nan.view(9, -1).any(1).nonzero().flatten().tolist() == [4]
        else:
            assert nan.any(1).nonzero().flatten().tolist() == [135]


@pytest.mark.skipif(not is_sm90, reason="the kernel needs an SM90")
def test_the_workspace_is_what_the_module_needs() -> None:
    from surogate_models_moe import _C

    for name in GROUPS:
        x = Product(KINDS[0], GROUPS[name])
        (scratch,) = bind_kernel(grouped.CUTLASS, x.op, x.contents).workspaces
        assert scratch.tensor.numel() == _C.grouped_gemm_workspace(len(GROUPS[name][0]))


def test_wrong_arguments_are_named() -> None:
    from surogate_models_moe import _C

    p = guarded((64,), torch.float32).pointer
    for arguments, message in (
        ((p, p, p, 0, p, 8, 8, 12, 1, 0, 1, False, 0, 0), "n and k must be multiples of 8, got 12"),
        ((p, p, p, 0, p, 8, 8, 8, 1, 0, 0, False, 0, 0), "results are bf16, or fp32 of wgrad, not fp32"),
        ((p, p, p, 0, p, 8, 8, 8, 1, 2, 1, True, 0, 0), "only fp32 accumulates"),
        ((p, p, p, 0, p, 8, 8, 8, 0, 0, 1, False, 0, 0), "experts must be 1 to 65535, got 0"),
        ((p + 8, p, p, 0, p, 8, 8, 8, 1, 0, 1, False, 0, 0), "a must be aligned to 16 bytes"),
        ((p, p, p, p, p, 8, 8, 8, 1, 1, 1, False, 0, 0), "only a forward product adds a bias"),
        ((p, p, p, 0, p, 8, 8, 8, 2, 0, 1, False, 3, 4), "there are no 2 experts from 3 on of 4"),
        ((p, p, p, 0, p, 8, 8, 8, 2, 2, 1, False, 0, 4), "only forward and dgrad are of some experts"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.grouped_mma(*arguments, 0)
    with pytest.raises(ValueError, match="at most 32 columns, got 40"):
        _C.grouped_narrow(p, p, p, p, 8, 48, 40, 1, 2, 1, False, 0)
