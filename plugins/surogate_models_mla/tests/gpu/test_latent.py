"""Kernels of latent attention, whose moves have the bits of the references, and whose sums their values in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.kernels import assert_close, same_bits
from surogate_models_mla import reference
from surogate_models_mla.kernels import KERNELS
from surogate_models_mla.ops import OPS

pytestmark = pytest.mark.gpu

KINDS = {definition.kind: definition for definition in OPS}
SIZES = [(1, 1, 8, 16, 8), (33, 3, 24, 16, 40), (70, 20, 192, 64, 256), (129, 16, 128, 64, 128), (4097, 2, 8, 32, 16)]
"""Tokens, heads, elements of a head without RoPE, with RoPE, and of a value."""


def run(kind: str, *ins: Tensor, **attrs: Any) -> list[Tensor]:
    values = tuple(Value(f"x{i}", tuple(x.shape), "bf16", "act") for i, x in enumerate(ins))
    outs = tuple(Value(s.label, s.shape, s.dtype, "act") for s in KINDS[kind].infer(values, attrs))
    return run_kernel(KERNELS, Op(kind, values, outs, attrs), dict(zip(values, ins, strict=True)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_heads_have_the_bits_of_the_reference(sizes: tuple[int, ...], interleaved: bool) -> None:
    tokens, heads, nope, rotary, v_dim = sizes
    widths = (heads * (nope + rotary), heads * (nope + v_dim), rotary)
    ins = [torch.randn(tokens, width).bfloat16() for width in widths]
    attrs: dict[str, Any] = {"n_heads": heads, "nope": nope, "interleaved": interleaved}
    (found,) = run("latent_qkv", *ins, **attrs)
    assert same_bits(found, reference.latent_qkv(*ins, **attrs))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_heads_match_the_reference(sizes: tuple[int, ...], interleaved: bool) -> None:
    tokens, heads, nope, rotary, v_dim = sizes
    dqkv = torch.randn(tokens, 3 * heads * (nope + rotary)).bfloat16()
    attrs: dict[str, Any] = {"n_heads": heads, "nope": nope, "interleaved": interleaved}
    attrs |= {"rotary": rotary, "v_dim": v_dim}
    found = run("latent_qkv_bwd", dqkv, **attrs)
    wanted = reference.latent_qkv_bwd(dqkv, **attrs)
    assert all(same_bits(ours, theirs) for ours, theirs in zip(found[:2], wanted[:2], strict=True))
    exact, magnitude = (reference.latent_qkv_bwd(x, **attrs)[2] for x in (dqkv.double(), dqkv.double().abs()))
    assert_close(found[2], exact, torch.bfloat16, heads, magnitude)
    assert all(map(same_bits, found, run("latent_qkv_bwd", dqkv, **attrs)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_columns_and_values_have_the_bits_of_the_reference(sizes: tuple[int, ...]) -> None:
    tokens, heads, nope, rotary, v_dim = sizes
    x = torch.randn(tokens, nope + rotary).bfloat16()
    parts = run("latent_split", x, rank=nope)
    assert all(map(same_bits, parts, reference.latent_split(x, rank=nope)))
    assert same_bits(run("latent_split_bwd", *parts)[0], x)
    wide = max(nope + rotary, v_dim)
    y = torch.randn(tokens, heads * wide).bfloat16()
    (narrow,) = run("latent_values", y, n_heads=heads, v_dim=v_dim)
    assert same_bits(narrow, reference.latent_values(y, n_heads=heads, v_dim=v_dim))
    (back,) = run("latent_values_bwd", narrow, n_heads=heads, head_dim=wide)
    assert same_bits(back, reference.latent_values_bwd(narrow, n_heads=heads, head_dim=wide))
