"""The compiled kernels of DoRA against their references, for any dtype, shape and alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import guarded, same_bits
from surogate_dora import reference
from surogate_dora.kernels import KERNELS
from surogate_dora.ops import OPS, Places

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in OPS}
FLOATS = pytest.mark.parametrize(
    ("dtype", "other"), [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")]
)
SKEWS = pytest.mark.parametrize("skew", [0, 1])
LAYOUTS: dict[str, tuple[int, int, int, Places, tuple[int, ...]]] = {
    # rows of x; columns and rows of W; places and ranks of the projections
    "one element": (1, 1, 1, ((0, 1),), (1,)),
    "one": (70, 64, 48, ((0, 48),), (4,)),
    "q, k, v": (130, 256, 96, ((0, 64), (64, 16), (80, 16)), (16, 16, 16)),
    "k alone": (9, 96, 300, ((64, 100),), (3,)),
    "odd": (131, 33, 301, ((1, 7), (9, 290)), (3, 5)),
}
MORE: dict[str, tuple[int, int, int, Places, tuple[int, ...]]] = {
    "8B, gate and up": (8192, 4096, 24576, ((0, 12288), (12288, 12288)), (16, 16)),
    "rank 256": (64, 4096, 6144, ((0, 4096), (4096, 1024), (5120, 1024)), (256, 256, 256)),
}
NAMES = cases([*LAYOUTS], more=[*MORE])


def drawn(dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape).to(TORCH_DTYPES[dtype])


def check(
    kind: str,
    ins: Sequence[tuple[Tensor, str]],
    attrs: Mapping[str, Any],
    *,
    skew: int,
    exact: Sequence[int] = (),
    accumulate: Sequence[int] = (),
    length: int = 1,
) -> None:
    """Compare the kernel with the reference: to the bit, or within the rounding of sums of `length` numbers."""
    contents = {Value(name=f"in{i}", shape=tuple(x.shape), dtype=d, role="act"): x for i, (x, d) in enumerate(ins)}
    specs = DEFINITIONS[kind].infer(tuple(contents), attrs)
    outs = tuple(Value(name=f"out{i}", shape=tuple(s.shape), dtype=s.dtype, role="grad") for i, s in enumerate(specs))
    before = {outs[i]: torch.randn(outs[i].shape) for i in accumulate}
    op = Op(kind, tuple(contents), outs, dict(attrs), accumulate=frozenset(accumulate))
    found = run_kernel(KERNELS, op, {**contents, **before}, skew=skew)
    expected = getattr(reference, kind)(*contents.values(), **attrs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for i, (out, ours, theirs) in enumerate(zip(outs, found, expected, strict=True)):
        if out in before:
            theirs = before[out] + theirs
        if i in exact:
            assert same_bits(ours, theirs), f"output {i}: {int((ours != theirs).sum())} of {ours.numel()} differ"
        else:
            step = 2.0**-7 if out.dtype == "bf16" else 2.0**-23 * (4 + length**0.5)
            assert float((ours.float() - theirs.float()).norm()) <= step * float(theirs.float().norm()) + 1e-30, i


@pytest.mark.parametrize("name", NAMES)
@FLOATS
@SKEWS
def test_norms_of_rows(name: str, dtype: str, other: str, skew: int) -> None:
    _, k, n, places, ranks = (LAYOUTS | MORE)[name]
    torch.manual_seed(0)
    weight, rank = drawn(dtype, n, k), sum(ranks)
    check("dora_magnitude", [(weight, dtype)], {"places": places, "dtype": other}, skew=skew, length=k)
    up = drawn(other, n, rank)
    up[: n // 2, : rank // 2] = 0  # ranks that a block does not read
    check("dora_norm", [(weight, dtype), (drawn(other, rank, k), other), (up, other)], {}, skew=skew, length=k * rank)


@pytest.mark.parametrize("name", NAMES)
@FLOATS
@SKEWS
def test_matrices_are_packed_and_gradients_unpacked_to_the_bit(name: str, dtype: str, other: str, skew: int) -> None:
    _, k, n, places, ranks = (LAYOUTS | MORE)[name]
    torch.manual_seed(0)
    matrices = [
        (drawn(other, *shape), other)
        for rank, (_, rows) in zip(ranks, places, strict=True)
        for shape in ((rank, k), (rows, rank))
    ]
    given = {"places": places, "scale": 0.3}
    check("dora_pack", matrices, {**given, "rows": n, "dtype": dtype}, skew=skew, exact=(0, 1))
    wholes = [(drawn("fp32", sum(ranks), k), "fp32"), (drawn("fp32", n, sum(ranks)), "fp32")]
    outs = range(2 * len(places))
    attrs = {**given, "ranks": ranks, "dtypes": (other,) * len(outs)}
    check("dora_unpack", wholes, attrs, skew=skew, exact=outs)
    if other == "fp32":
        check("dora_unpack", wholes, attrs, skew=skew, exact=outs, accumulate=outs)


@pytest.mark.parametrize("name", NAMES)
@FLOATS
@SKEWS
@pytest.mark.parametrize("bias", [False, True])
def test_columns_are_scaled_to_the_bit(name: str, dtype: str, other: str, skew: int, bias: bool) -> None:
    t, _, n, places, _ = (LAYOUTS | MORE)[name]
    torch.manual_seed(0)
    given = [(drawn(dtype, t, n), dtype), (torch.rand(n) + 0.5, "fp32")]
    given += [(drawn(other, count), other) for _, count in places]
    check("dora_scale", given + [(drawn(dtype, n), dtype)] * bias, {"places": places}, skew=skew, exact=(0,))


@pytest.mark.parametrize("name", NAMES)
@FLOATS
@SKEWS
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_of_scaled_columns(name: str, dtype: str, other: str, skew: int, adds: bool) -> None:
    t, _, n, places, _ = (LAYOUTS | MORE)[name]
    torch.manual_seed(0)
    given = [(drawn(dtype, t, n), dtype), (drawn(dtype, t, n), dtype), (torch.rand(n) + 0.5, "fp32")]
    given += [(drawn(other, count), other) for _, count in places]
    accumulate = range(1, 1 + len(places)) if adds else ()
    attrs = {"places": places}
    check("dora_scale_bwd", given, attrs, skew=skew, exact=(0,), accumulate=accumulate, length=t)


def test_wrong_arguments_are_named() -> None:
    from surogate_dora import _C

    p = guarded((64,), torch.float32).pointer
    for call, message in (
        (lambda: _C.dora_row_norms(0, 0, 0, p, 1, 8, 0, 0, 0, 0, 0), "weight is a null pointer"),
        (lambda: _C.dora_row_norms(p, p, p, p, 1, 8, 1025, 0, 0, 0, 0), "ranks must be 0 to 1024"),
        (lambda: _C.dora_move(p, p, 8, 8, 1, 8, 4, 8, 1.0, 0, 0, 0, 0), "the band leaves the columns"),
        (lambda: _C.dora_move(p, p, 8, 8, 1, 8, 0, 8, 1.0, 0, 1, 1, 0), "only fp32 accumulates"),
        (lambda: _C.dora_scale(p, p, p, 0, p, 1, 8, 4, 0, 0, 0, 0), "stride must be at least columns"),
        (lambda: _C.dora_scale(p, p, p, 0, p, 1, 8, 8, 2, 0, 0, 0), "h must be fp32 or bf16, not fp64"),
        (lambda: _C.dora_scale_bwd(p, p, p, p, p, p, p, 1, 8, 8, 0, 0, 0, 0, 0, 0), "slabs must be 1 to 128"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
