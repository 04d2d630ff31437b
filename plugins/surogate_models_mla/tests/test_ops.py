"""Ops of latent attention: their moves against views, their gradients by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import ProgramError, Value
from surogate_core.testing.ops import check_op
from surogate_models_mla import reference
from surogate_models_mla.ops import OPS

KINDS = {definition.kind: definition for definition in OPS}
HEADS, NOPE, ROTARY = 3, 5, 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def given(v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, and the rotated key, of 7 tokens."""
    wide = NOPE + ROTARY
    return drawn(7, HEADS * wide), drawn(7, HEADS * (NOPE + v_dim), seed=1), drawn(7, ROTARY, seed=2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("v_dim", [2, 9])
def test_every_head_has_its_parts_the_shared_key_and_a_padded_value(v_dim: int, interleaved: bool) -> None:
    q, kv, rotated = given(v_dim)
    attrs: dict[str, Any] = {"n_heads": HEADS, "nope": NOPE, "interleaved": interleaved}
    (found,) = check_op(KINDS["latent_qkv"], q, kv, rotated, **attrs)
    queries, keys, values = found.view(7, 3, HEADS, -1).unbind(1)
    order = [0, 2, 1, 3] if interleaved else [0, 1, 2, 3]
    for head in range(HEADS):
        query, key = q.view(7, HEADS, -1)[:, head], kv.view(7, HEADS, -1)[:, head]
        assert torch.equal(queries[:, head], torch.cat((query[:, NOPE:][:, order], query[:, :NOPE]), 1))
        assert torch.equal(keys[:, head], torch.cat((rotated[:, order], key[:, :NOPE]), 1))
        assert torch.equal(values[:, head, :v_dim], key[:, NOPE:])
        assert not values[:, head, v_dim:].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("v_dim", [2, 9])
def test_gradients_are_those_of_autograd(v_dim: int, interleaved: bool) -> None:
    attrs: dict[str, Any] = {"n_heads": HEADS, "nope": NOPE, "interleaved": interleaved}
    ins = tuple(x.requires_grad_() for x in given(v_dim))
    out = reference.latent_qkv(*ins, **attrs)
    dout = drawn(*out.shape, seed=3)
    wanted = torch.autograd.grad((out * dout).sum(), ins)
    found = check_op(KINDS["latent_qkv_bwd"], dout, rotary=ROTARY, v_dim=v_dim, **attrs)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-14)


def test_columns_and_values_are_moved_and_moved_back() -> None:
    x = drawn(7, 12)
    latent, rotated = check_op(KINDS["latent_split"], x, rank=8)
    assert torch.equal(torch.cat((latent, rotated), 1), x)
    assert torch.equal(check_op(KINDS["latent_split_bwd"], latent, rotated)[0], x)
    (narrow,) = check_op(KINDS["latent_values"], x, n_heads=3, v_dim=3)
    assert torch.equal(narrow.view(7, 3, 3), x.view(7, 3, 4)[..., :3])
    (wide,) = check_op(KINDS["latent_values_bwd"], narrow, n_heads=3, head_dim=4)
    assert torch.equal(wide.view(7, 3, 4)[..., :3], narrow.view(7, 3, 3)) and not wide.view(7, 3, 4)[..., 3].any()


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((27, 21, 3), "RoPE rotates pairs"),
        ((26, 21, 4), "must have 3 heads of 5 [+] 4 elements"),
        ((27, 22, 4), "and values no wider"),
        ((27, 15, 4), "and values no wider"),
        ((27, 48, 4), "and values no wider"),
    ],
)
def test_other_widths_are_refused(widths: tuple[int, int, int], message: str) -> None:
    ins = [Value("x", (7, width), "bf16", "act") for width in widths]
    with pytest.raises(ProgramError, match=message):
        KINDS["latent_qkv"].infer(ins, {"n_heads": HEADS, "nope": NOPE, "interleaved": True})
