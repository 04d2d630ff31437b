"""Products over few terms that add to a base, bound through their KernelDefs, against the references: bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from surogate_core.api import Op, Value
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import guarded
from surogate_models_moe import reference
from surogate_models_moe.kernels import grouped

pytestmark = pytest.mark.gpu

FORWARD, DGRAD = "grouped_linear_add", "grouped_linear_dgrad_add"
SHAPES: dict[str, tuple[Sequence[int], int, int]] = {
    # rows of each expert; columns of the result; terms
    "one row": ([1], 8, 8),
    "uneven": ([0, 5, 130, 0, 128, 1, 0, 61, 0], 136, 16),
    "one has all": ([0, 0, 300, 0], 264, 24),
    "more experts than lanes": ([3, 0, 1, 2] * 18, 48, 40),
    "most terms": ([130, 0, 5], 256, 64),
}
MORE: dict[str, tuple[Sequence[int], int, int]] = {
    "Qwen3-30B-A3B, up": ([i * 7 % 509 for i in range(128)], 1536, 16),
    "Qwen3-30B-A3B, gradient of rows": ([i * 7 % 509 for i in range(128)], 2048, 32),
}


@pytest.mark.parametrize("kind", [FORWARD, DGRAD])
@pytest.mark.parametrize("name", cases([*SHAPES], more=[*MORE]))
def test_sums_are_those_of_a_product_and_an_addition(kind: str, name: str) -> None:
    """The product is rounded, then the sum. Sums of 64 terms have other orders than torch's, so single elements may
    round to the other side, twice."""
    counts, width, terms = (SHAPES | MORE)[name]
    rows, experts = sum(counts), len(counts)
    w = (experts * terms, width) if kind == DGRAD else (experts * width, terms)
    shapes = {"x": (rows, terms), "w": w, "base": (rows, width)}
    values = {label: Value(label, shape, "bf16", "act") for label, shape in shapes.items()}
    ends = Value("ends", (experts,), "int32", "act")
    contents = {value: torch.randn(value.shape).bfloat16() for value in values.values()}
    contents[ends] = torch.tensor(counts).cumsum(0).int()
    out = Value("y", (rows, width), "bf16", "act")
    op = Op(kind, (values["x"], values["w"], ends, values["base"]), (out,), {})
    (ours,) = run_kernel(grouped.THIN, op, contents)
    x, weights, base = (contents[v].double() for v in values.values())
    multiply = getattr(reference, kind.removesuffix("_add"))
    product, size = (multiply(a, b, contents[ends]) for a, b in ((x, weights), (x.abs(), weights.abs())))
    truth = product + base
    allowed = 2.0**-8 * (product.abs() + truth.abs()) + 4 * (1 + terms**0.5) * 2.0**-24 * (size + base.abs())
    assert float(((ours.cpu().double() - truth).abs() - allowed).max()) <= 0
    exact = getattr(reference, kind)(*(contents[v] for v in op.ins))
    assert float((ours.cpu() != exact).float().mean()) < 1e-3


def test_wrong_arguments_are_named() -> None:
    from surogate_models_moe import _C

    p = guarded((64,), torch.float32).pointer
    for arguments, message in (
        ((p, p, p, p, p, 8, 12, 8, 1, False), "width and terms must be multiples of 8, got 12"),
        ((p, p, p, p, p, 8, 8, 72, 1, False), "at most 64 terms, got 72"),
        ((p, p, p, p, p, 8, 8, 8, 0, False), "experts must be 1 to 65535, got 0"),
        ((p, p, p, p + 8, p, 8, 8, 8, 1, False), "base must be aligned to 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.grouped_thin(*arguments, 0, 0)
