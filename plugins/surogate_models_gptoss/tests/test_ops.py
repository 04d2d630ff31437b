"""Attention sinks: against a softmax with one more score, and its gradient by autograd, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import ProgramError, Value
from surogate_core.reference.attention import attention, attention_bwd
from surogate_core.testing.ops import as_inputs, check_op
from surogate_models_gptoss.ops import OPS
from surogate_models_gptoss.reference import add_sinks, sinks_gradient

ADD, GRADIENT = OPS
HEADS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
LENGTHS = [(1, 2, 17, 30), (50,), (49, 1)]


def inputs(lengths: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return qkv, the bounds of documents, and sinks of which one is far above all scores and one far below."""
    gen = torch.Generator().manual_seed(seed)
    qkv = torch.randn(sum(lengths), 8 * 8, generator=gen, dtype=torch.float64)
    sinks = torch.randn(4, generator=gen, dtype=torch.float64)
    sinks[1:3] = torch.tensor([30.0, -30.0])
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return qkv.to(dtype), bounds, sinks.to(dtype)


def by_softmax(qkv: Tensor, bounds: Tensor, sinks: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The definition: a column of sinks in the softmax, whose value is zero."""
    outs, lses = [], []
    for x in qkv.split(bounds.diff().tolist()):
        q, k, v = (y.view(len(x), -1, 8).transpose(0, 1) for y in x.split([32, 16, 16], 1))
        k, v = (y.repeat_interleave(2, 0) for y in (k, v))
        i = torch.arange(len(x))
        seen = (i[:, None] >= i) & ((i[:, None] - i < window) if window else (i == i))
        scores = (q @ k.mT * 8**-0.5).masked_fill(~seen, -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(x), 1)], -1)
        outs.append((scores.softmax(-1)[..., :-1] @ v).transpose(0, 1).reshape(len(x), -1))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_sinks_and_their_gradients_are_those_of_a_softmax_with_one_more_score(lengths: Any, window: int) -> None:
    qkv, bounds, sinks = inputs(lengths)
    attrs = {**HEADS, "seq_len": sum(lengths), "window": window}
    qkv.requires_grad_()
    sinks.requires_grad_()
    wanted, wanted_lse = by_softmax(qkv, bounds, sinks, window)
    dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted_dqkv, wanted_dsinks = torch.autograd.grad((wanted * dout).sum(), (qkv, sinks))
    with torch.no_grad():
        own = attention(qkv, bounds, **attrs)
        out, lse = add_sinks(qkv, bounds, *own, sinks, **attrs)
        dqkv = attention_bwd(dout, qkv, out, lse, bounds, own=False, **attrs)
        dsinks = sinks_gradient(dout, out, lse, sinks)
    pairs = ((out, wanted), (lse, wanted_lse), (dqkv, wanted_dqkv), (dsinks, wanted_dsinks))
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_have_the_shapes_and_dtypes_of_the_rules(dtype: torch.dtype) -> None:
    qkv, bounds, sinks = inputs((20, 30), dtype=dtype)
    attrs = {**HEADS, "seq_len": 50, "window": 0}
    out, lse = check_op(ADD, qkv, bounds, *attention(qkv, bounds, **attrs), sinks, **attrs)
    (dsinks,) = check_op(GRADIENT, torch.randn(out.shape).to(dtype), out, lse, sinks)
    assert out.dtype == dtype and lse.dtype == dsinks.dtype == torch.float32


def _values(**changes: tuple[int, ...]) -> list[Value]:
    shapes = {"qkv": (50, 64), "bounds": (3,), "out": (50, 32), "lse": (4, 50), "sinks": (4,)} | changes
    tensors = [torch.zeros(shape, dtype=torch.int32 if name == "bounds" else None) for name, shape in shapes.items()]
    return list(as_inputs(tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sinks": (3,)}, "has no 3 heads of equal width, one for each of sinks"),
        ({"sinks": (2,), "lse": (2, 50)}, r"sinks must be \[4\]"),
        ({"lse": (50, 4)}, r"lse must be fp32 \[4, 50\]"),
        ({"qkv": (50, 60)}, r"qkv must be \[50, 64\]"),
        ({"out": (50,)}, "out must be a matrix and sinks a vector"),
    ],
)
def test_values_of_other_shapes_are_refused(changes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        ADD.infer(_values(**changes), {**HEADS, "seq_len": 50, "window": 0})


def test_a_gradient_of_another_shape_is_refused() -> None:
    values = list(as_inputs([torch.zeros(50, 30), torch.zeros(50, 32), torch.zeros(4, 50), torch.zeros(4)]))
    with pytest.raises(ProgramError, match="dout must be as out"):
        GRADIENT.infer(values, {})
