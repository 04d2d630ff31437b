"""Kernels of attention sinks, compared with the references in fp64 on the same inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import run_kernel, run_op
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, same_bits
from surogate_models_gptoss import reference
from surogate_models_gptoss.kernels import KERNELS
from surogate_models_gptoss.ops import OPS

pytestmark = pytest.mark.gpu

ADD, GRADIENT = OPS
SIZES = cases([(1, 1, 64), (300, 4, 64), (77, 3, 128), (515, 2, 256)], more=[(4096, 64, 64)])
"""Tokens, heads, elements of a head: less than a run of 256 tokens, and several."""


def drawn(tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and sinks, of which some are far above and far below all scores."""
    out, lse = torch.randn(tokens, heads * dim).bfloat16(), 2 * torch.randn(heads, tokens) + 3
    sinks = torch.randn(heads).bfloat16()
    sinks[0] = 40
    sinks[-1] = -40 if heads > 1 else 1
    return out, lse, sinks


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sinks_match_fp64(sizes: tuple[int, int, int]) -> None:
    tokens, heads, dim = sizes
    out, lse, sinks = drawn(tokens, heads, dim)
    qkv, bounds = torch.zeros(tokens, 3 * heads * dim).bfloat16(), torch.tensor([0, tokens]).int()
    attrs = {
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": dim,
        "seq_len": tokens,
    }  # a window is for the backward rule alone
    found, found_lse = run_op(KERNELS, ADD, (qkv, bounds, out, lse, sinks), attrs)
    wanted = reference.add_sinks(qkv, bounds, out.double(), lse.double(), sinks.double(), **attrs)
    assert_close(found, wanted[0], torch.bfloat16, 8)
    assert_close(found_lse, wanted[1], torch.float32, 8)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_sinks_match_fp64_and_are_added_or_rounded_once(sizes: tuple[int, int, int]) -> None:
    tokens, heads, dim = sizes
    out, lse, sinks = drawn(tokens, heads, dim)
    lse, dout = torch.logaddexp(lse, sinks.float()[:, None]), torch.randn(tokens, heads * dim).bfloat16()
    (found,) = run_op(KERNELS, GRADIENT, (dout, out, lse, sinks), {})
    wide = [x.double() for x in (dout, out, lse, sinks)]
    wanted = reference.sinks_gradient(*wide)
    magnitude = reference.sinks_gradient(wide[0].abs(), wide[1].abs(), *wide[2:]).abs()
    assert_close(found, wanted, torch.float32, 8 * tokens * dim, magnitude)
    (again,) = run_op(KERNELS, GRADIENT, (dout, out, lse, sinks), {})
    assert same_bits(found, again)

    values = [
        Value(f"in{i}", tuple(x.shape), "fp32" if x is lse else "bf16", "act")
        for i, x in enumerate((dout, out, lse, sinks))
    ]
    contents = dict(zip(values, (dout, out, lse, sinks), strict=True))
    grad, before = Value("d", (heads,), "fp32", "grad"), torch.randn(heads)
    op = Op(GRADIENT.kind, tuple(values), (grad,), {}, accumulate=frozenset({0}))
    (total,) = run_kernel(KERNELS, op, {**contents, grad: before})
    assert same_bits(total, before + found)
    op = Op(GRADIENT.kind, tuple(values), (Value("d", (heads,), "bf16", "grad"),), {})
    (rounded,) = run_kernel(KERNELS, op, contents)
    assert same_bits(rounded, found.bfloat16())
