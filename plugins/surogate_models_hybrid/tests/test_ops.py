"""Ops of hybrid models: against a recurrence token by token, autograd, and each document by itself, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.api import Op, ProgramError, Target, Value
from surogate_core.testing.devices import device
from surogate_core.testing.ops import as_inputs, check_op
from surogate_models_hybrid import reference
from surogate_models_hybrid.kernels import KERNELS
from surogate_models_hybrid.ops import OPS

KINDS = {definition.kind: definition for definition in OPS}
LENGTHS = [(1, 2, 63, 64, 65, 129), (129, 65, 64, 63, 2, 1), (64, 1, 1, 127, 2), (70, 1, 7), (192,)]
SLOW = -6.0
"""An a_log with which a state keeps about 0.998 of itself from one token to the next."""


def positions(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def delta_inputs(tokens: int, share: int, keys: int = 2, k_dim: int = 8, v_dim: int = 12) -> tuple[Any, ...]:
    heads = keys * share
    sizes = {"n_k_heads": keys, "n_v_heads": heads, "k_dim": k_dim, "v_dim": v_dim}
    qkv = normal(tokens, 2 * keys * k_dim + heads * v_dim, seed=0)
    return qkv, normal(tokens, 2 * heads, seed=1), SLOW + normal(heads, seed=2), normal(heads, seed=3), sizes


def by_token(qkv: Tensor, ba: Tensor, a_log: Tensor, dt_bias: Tensor, lengths: Sequence[int], sizes: Any) -> Tensor:
    """The definition of the op: each document by itself, one token after another."""
    keys, heads, k_dim, v_dim = sizes.values()
    outs = []
    for x, gates in zip(qkv.split(list(lengths)), ba.split(list(lengths)), strict=True):
        state = x.new_zeros(heads, k_dim, v_dim)
        for row, (b, a) in zip(x, (gate.split(heads) for gate in gates), strict=True):
            q, k, v = row.split([keys * k_dim, keys * k_dim, heads * v_dim])
            q, k = (
                y.view(keys, k_dim) / (y.view(keys, k_dim).square().sum(1, keepdim=True) + 1e-6).sqrt() for y in (q, k)
            )
            q, k = (y.repeat_interleave(heads // keys, 0) for y in (q / k_dim**0.5, k))
            state = state * (-a_log.exp() * F.softplus(a + dt_bias)).exp()[:, None, None]
            seen = torch.einsum("hkv,hk->hv", state, k)
            state = state + k[:, :, None] * (b.sigmoid()[:, None] * (v.view(heads, v_dim) - seen))[:, None]
            outs.append(torch.einsum("hkv,hk->hv", state, q).flatten())
    return torch.stack(outs)


@pytest.mark.parametrize("a_log", [SLOW, 0.0, 4.0])
@pytest.mark.parametrize("share", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_delta_rule_is_the_recurrence_of_each_document(lengths: tuple[int, ...], share: int, a_log: float) -> None:
    """Outputs and gradients, the backward op from the states that the forward op returns.

    With a_log of 4 a state keeps e^-70 of itself, so that inverse decays would be infinite.
    """
    *inputs, sizes = delta_inputs(sum(lengths), share)
    inputs[2] = inputs[2] - SLOW + a_log
    where = positions(lengths)
    leaves = [x.clone().requires_grad_() for x in inputs]
    truth = by_token(*leaves, lengths, sizes)
    dout = normal(*truth.shape, seed=4)
    wanted = torch.autograd.grad(truth, leaves, dout)
    out, states = reference.gated_delta_rule(*inputs, where, **sizes)
    assert torch.allclose(out, truth, rtol=1e-11, atol=1e-12)
    found = reference.gated_delta_rule_bwd(dout, *inputs, where, states, **sizes)
    for ours, exact in zip(found, wanted, strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 1e-11


@pytest.mark.parametrize("boundary", range(1, 128))
def test_a_boundary_may_be_at_every_place_of_a_chunk(boundary: int) -> None:
    lengths = (boundary, 140 - boundary)
    *inputs, sizes = delta_inputs(140, 2, k_dim=4, v_dim=4)
    out, _ = reference.gated_delta_rule(*inputs, positions(lengths), **sizes)
    apart = [
        reference.gated_delta_rule(
            *(x.split(list(lengths))[i] for x in inputs[:2]), *inputs[2:], positions([n]), **sizes
        )[0]
        for i, n in enumerate(lengths)
    ]
    assert torch.allclose(out, torch.cat(apart), rtol=1e-11, atol=1e-12)


def test_states_are_those_in_front_of_chunks() -> None:
    *inputs, sizes = delta_inputs(192, 2)
    _, states = reference.gated_delta_rule(*inputs, positions([192]), **sizes)
    assert not states[0].any()
    for i in (1, 2):
        parts = (x[: 64 * i] for x in inputs[:2])
        _, before = reference.gated_delta_rule(*parts, *inputs[2:], positions([64 * i]), **sizes)
        assert torch.equal(before, states[:i])


@pytest.mark.parametrize(("a_log", "seen"), [(SLOW, True), (3.0, False)])
def test_only_a_slow_decay_shows_a_state_that_leaks(a_log: float, seen: bool) -> None:
    """With decays of random weights the state of another document is lost at its first token, whatever reads it."""
    *inputs, sizes = delta_inputs(80, 2)
    inputs[2] = torch.full_like(inputs[2], a_log)
    right, leaks = (reference.gated_delta_rule(*inputs, positions(n), **sizes)[0][64:] for n in ([64, 16], [80]))
    assert (float((right - leaks).norm() / right.norm()) > 1e-2) == seen


def test_missing_tokens_of_the_last_chunk_change_nothing() -> None:
    *inputs, sizes = delta_inputs(100, 2)
    dout = normal(100, 48, seed=4)
    out, states = reference.gated_delta_rule(*inputs, positions([100]), **sizes)
    longer = [torch.cat((x, normal(28, x.shape[1], seed=9))) for x in inputs[:2]]
    more, same = reference.gated_delta_rule(*longer, *inputs[2:], positions([100, 28]), **sizes)
    assert torch.allclose(out, more[:100], rtol=1e-12, atol=1e-13) and torch.equal(states, same)
    grads = reference.gated_delta_rule_bwd(dout, *inputs, positions([100]), states, **sizes)
    padded = torch.cat((dout, dout.new_zeros(28, 48)))
    again = reference.gated_delta_rule_bwd(padded, *longer, *inputs[2:], positions([100, 28]), states, **sizes)
    assert torch.allclose(grads[0], again[0][:100], rtol=1e-10, atol=1e-12) and not again[0][100:].any()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_ops_have_the_shapes_and_dtypes_that_they_declare(dtype: str) -> None:
    """States have the dtype of qkv; gradients of params that of the sum."""
    *inputs, sizes = delta_inputs(70, 2)
    qkv, ba = (x.to(getattr(torch, dtype)) for x in inputs[:2])
    ins = (qkv, ba, *(x.float() for x in inputs[2:]), positions([30, 40]))
    out, states = check_op(KINDS["gated_delta_rule"], *ins, **sizes)
    assert torch.equal(check_op(KINDS["gated_delta_out"], *ins, **sizes)[0], out)
    assert torch.equal(check_op(KINDS["gated_delta_states"], *ins, **sizes)[0], states)
    check_op(KINDS["gated_delta_rule_bwd"], out, *ins, states, **sizes)
    w = normal(qkv.shape[1], 1, 4, seed=5).to(qkv.dtype)
    for silu in (True, False):
        (y,) = check_op(KINDS["causal_conv"], qkv, w, ins[-1], silu=silu)
        dx, _ = check_op(KINDS["causal_conv_bwd"], y, qkv, w, ins[-1], silu=silu)
        assert torch.equal(check_op(KINDS["causal_conv_dgrad"], y, qkv, w, ins[-1], silu=silu)[0], dx)
    y, rstd = check_op(KINDS["gated_rmsnorm"], out, out, w[:12, 0, 0].contiguous(), eps=1e-6)
    dx, dgate, _ = check_op(KINDS["gated_rmsnorm_bwd"], y, out, out, w[:12, 0, 0].contiguous(), rstd)
    pair = check_op(KINDS["gated_rmsnorm_dgrad"], y, out, out, w[:12, 0, 0].contiguous(), rstd)
    assert all(map(torch.equal, pair, (dx, dgate)))
    parts = check_op(KINDS["split_gate"], out, n_heads=2, head_dim=8)
    assert torch.equal(check_op(KINDS["join_gate"], *parts, n_heads=2, head_dim=8)[0], out)
    heads = {"n_k_heads": 1, "n_v_heads": 2, "k_dim": 4, "v_dim": 4}
    sorted_parts = check_op(KINDS["split_key_heads"], out[:, :24].contiguous(), out[:, 24:28].contiguous(), **heads)
    whole = torch.cat(check_op(KINDS["join_key_heads"], *sorted_parts, **heads), dim=1)
    assert torch.equal(whole, out[:, :28])
    check_op(KINDS["sigmoid_gate_bwd"], *check_op(KINDS["sigmoid_gate"], out, y), out, y)


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("width", [3, 4, 7])
def test_the_convolution_is_that_of_torch_for_each_document(width: int, silu: bool) -> None:
    lengths = (1, 2, 3, 9, 1, 20)
    x, w = normal(36, 5, seed=0).requires_grad_(), normal(5, 1, width, seed=1).requires_grad_()
    parts = [F.conv1d(F.pad(part.T, (width - 1, 0))[None], w, groups=5)[0].T for part in x.split(list(lengths))]
    truth = F.silu(torch.cat(parts)) if silu else torch.cat(parts)
    dy = normal(36, 5, seed=2)
    dx, dw = torch.autograd.grad(truth, (x, w), dy)
    ins = (x.detach(), w.detach(), positions(lengths))
    assert torch.allclose(reference.causal_conv(*ins, silu=silu), truth, rtol=1e-12, atol=1e-13)
    ours = reference.causal_conv_bwd(dy, *ins, silu=silu)
    assert torch.allclose(ours[0], dx, rtol=1e-11, atol=1e-12) and torch.allclose(ours[1], dw, rtol=1e-11, atol=1e-12)


def test_the_gates_and_their_gradients_are_those_of_autograd() -> None:
    x, gate, w = (normal(*shape, seed=i).requires_grad_() for i, shape in enumerate([(9, 24), (9, 24), (8,)]))
    dy = normal(9, 24, seed=4)
    heads = x.view(9, 3, 8)
    normed = F.rms_norm(heads, (8,), w, 1e-3).flatten(1) * F.silu(gate)
    y, rstd = reference.gated_rmsnorm(*(z.detach() for z in (x, gate, w)), eps=1e-3)
    assert torch.allclose(y, normed, rtol=1e-12)
    ours = reference.gated_rmsnorm_bwd(dy, *(z.detach() for z in (x, gate, w)), rstd)
    assert all(map(torch.allclose, ours, torch.autograd.grad(normed, (x, gate, w), dy)))
    opened = x * gate.sigmoid()
    assert torch.equal(reference.sigmoid_gate(x.detach(), gate.detach()), opened)
    both = reference.sigmoid_gate_bwd(dy, x.detach(), gate.detach())
    assert all(map(torch.allclose, both, torch.autograd.grad(opened, (x, gate), dy)))


def test_a_gate_follows_the_query_of_its_head() -> None:
    x = torch.arange(14.0)[None]
    qkv, gate = reference.split_gate(x, n_heads=2, head_dim=3)
    assert qkv.tolist() == [[0, 1, 2, 6, 7, 8, 12, 13]] and gate.tolist() == [[3, 4, 5, 9, 10, 11]]


def test_projections_by_key_heads_are_sorted() -> None:
    """Two key heads of 2, each with three value heads of 1: [q q k k v v v z z z] and [b b b a a a] of each."""
    heads = {"n_k_heads": 2, "n_v_heads": 6, "k_dim": 2, "v_dim": 1}
    qkvz, ba = torch.arange(20.0)[None], torch.arange(12.0)[None]
    qkv, z, sorted_ba = reference.split_key_heads(qkvz, ba, **heads)
    assert qkv.tolist() == [[0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 6, 14, 15, 16]]
    assert z.tolist() == [[7, 8, 9, 17, 18, 19]]
    assert sorted_ba.tolist() == [[0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]]
    back = reference.join_key_heads(qkv, z, sorted_ba, **heads)
    assert torch.equal(back[0], qkvz) and torch.equal(back[1], ba)


def infer(kind: str, *ins: Tensor, **attrs: Any) -> None:
    KINDS[kind].specs(tuple(as_inputs(ins)), attrs, "here")


def test_wrong_shapes_are_named() -> None:
    *inputs, sizes = delta_inputs(8, 2)
    where = positions([8])
    x, w = inputs[0], normal(inputs[0].shape[1], 1, 4, seed=0)
    cases: list[tuple[str, tuple[Tensor, ...], dict[str, Any], str]] = [
        ("causal_conv", (x, w[..., :2], where), {}, "w must have 3 to 7 taps, not 2"),
        ("causal_conv", (x, w[1:], where), {}, "w must be [80, 1, W]"),
        ("causal_conv", (x, w, where[1:]), {}, "positions must be int32 [8]"),
        ("gated_delta_rule", (x[:, 1:], *inputs[1:], where), sizes, "qkv has 79 columns, heads need 80"),
        ("gated_delta_rule", (*inputs, where), {**sizes, "n_k_heads": 3}, "4 value heads cannot share 3 key heads"),
        ("gated_delta_rule", (*inputs, where), {**sizes, "k_dim": 0}, "must be positive"),
        ("gated_delta_rule", (x, inputs[1][1:], *inputs[2:], where), sizes, "ba must have shape [8, 8]"),
        ("gated_delta_rule", (*inputs[:3], inputs[3][1:], where), sizes, "dt_bias must have shape [4]"),
        ("gated_delta_rule", (*inputs, where.long()), sizes, "positions must be int32 [8]"),
        ("gated_rmsnorm", (x, x, w[:7, 0, 0]), {"eps": 1e-6}, "w must be [D] of heads of D"),
        ("gated_rmsnorm", (x, x[1:], w[:8, 0, 0]), {"eps": 1e-6}, "gate must have the shape of x, [8, 80]"),
        ("split_gate", (x,), {"n_heads": 6, "head_dim": 8}, "x has 80 columns, queries and gates need 96"),
        ("split_key_heads", (x, inputs[1]), sizes, "qkvz has 80 columns, heads need"),
        ("join_key_heads", (x, x[:, 1:], inputs[1]), sizes, "z must be [8, "),
        ("sigmoid_gate", (x, x[:, 1:]), {}, "gate must have the shape of x"),
    ]
    for kind, ins, attrs, message in cases:
        with pytest.raises(ProgramError) as caught:
            infer(kind, *ins, **attrs)
        assert message in str(caught.value), (kind, message)


def test_costs_are_those_of_the_algorithm_by_chunks() -> None:
    """Per token, with 16 key and 32 value heads of 128: 4.81 MFLOP forward, 49 KiB besides the states; see `ops.py`."""
    sizes = {"n_k_heads": 16, "n_v_heads": 32, "k_dim": 128, "v_dim": 128}
    tokens = 8192
    ins = (
        Value("qkv", (tokens, 8192), "bf16", "act"),
        Value("ba", (tokens, 64), "bf16", "act"),
        Value("a_log", (32,), "fp32", "param"),
        Value("dt_bias", (32,), "fp32", "param"),
        Value("positions", (tokens,), "int32", "input"),
    )
    forward = KINDS["gated_delta_rule"]
    outs = tuple(Value(s.label, s.shape, s.dtype, "act") for s in forward.infer(ins, sizes))
    op = Op("gated_delta_rule", ins, outs, sizes, phase="forward")
    assert forward.flops(op) / tokens == pytest.approx(4.81e6, rel=0.005)
    assert forward.traffic is not None
    assert (forward.traffic(op) - outs[1].nbytes) / tokens / 1024 == pytest.approx(49, rel=0.02)
    assert outs[1].nbytes / tokens / 1024 == 16
    backward = KINDS["gated_delta_rule_bwd"]
    taken = (outs[0], *ins, outs[1])
    given = tuple(Value(s.label, s.shape, s.dtype, "act") for s in backward.infer(taken, sizes))
    reverse = Op("gated_delta_rule_bwd", taken, given, sizes, phase="backward")
    assert backward.flops(reverse) / tokens == pytest.approx(12.7e6, rel=0.01)
    for card in ("h200", "a100", "rtx4090"):  # blocks of which have 227, 163 and 99 KiB
        assert all(kernel.supports(reverse, Target(device(card))).ok for kernel in KERNELS if kernel.op == reverse.kind)
    states = Op("gated_delta_states", ins, outs[1:], sizes, phase="recompute")
    assert KINDS["gated_delta_states"].flops(states) / forward.flops(op) == pytest.approx(0.62, abs=0.02)


@pytest.mark.parametrize("kind", ["gated_delta_rule", "causal_conv"])
def test_no_bit_of_a_document_depends_on_the_tokens_of_another(kind: str) -> None:
    """In fp32 too, where sums over several documents would be rounded by the values of all."""
    *inputs, sizes = delta_inputs(150, 2)
    qkv, ba, a_log, dt_bias = (x.float() for x in inputs)
    where, cut = positions([30, 77, 43]), slice(30, 107)
    others = [x.clone() for x in (qkv, ba)]
    for x in others:
        x[:30], x[107:] = 3 * x[:30].flip(0), x[107:].flip(0) - 1
    if kind == "causal_conv":
        w = normal(qkv.shape[1], 1, 4, seed=5).float()
        found = [reference.causal_conv(x, w, where)[cut] for x in (qkv, others[0])]
    else:
        every = ((qkv, ba), others)
        found = [reference.gated_delta_rule(*x, a_log, dt_bias, where, **sizes)[0][cut] for x in every]
    assert torch.equal(*found)
