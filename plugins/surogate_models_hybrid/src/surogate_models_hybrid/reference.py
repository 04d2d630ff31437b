"""Torch references of the ops in `ops.py`. They compute in fp32 (fp64 for fp64 inputs) and round each output once.

The gated delta rule is computed by chunks of C = 64 tokens on a fixed grid. With G the sum of g over the tokens of the
document in the chunk up to each, D_ij = exp(G_i - G_j) for j <= i, and S the state in front of the chunk:

    A  = (I + tril(beta K K^T * D, -1))^-1
    V' = A (beta (V - e^G K S))
    O  = e^G Q S + (Q K^T * D) V'
    S  = e^(G_C) S + (e^(G_C - G) K)^T V'

Boundaries of documents are masks: D_ij is 0 unless both tokens are of one document. Only tokens of the document in
which the chunk before ended read S. Only those of the last document of the chunk write S, and the old S is dropped if
that document began in the chunk. G begins anew in each document, so that not even its rounding depends on another one.
Differences of G are masked before exp: between documents, or for j > i, it may be infinite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference.ops import up

from .ops import CHUNK

_EPS = 1e-6

# ---------------------------------------------------------------------------------------------------------- convolution


def causal_conv(x: Tensor, w: Tensor, positions: Tensor, *, silu: bool = True) -> Tensor:
    """silu(sum over j of w[c, W - 1 - j] x[t - j, c]), for j up to the position of the token."""
    mixed = _mixed(up(x), up(w), positions)
    return (F.silu(mixed) if silu else mixed).to(x.dtype)


def causal_conv_bwd(dy: Tensor, x: Tensor, w: Tensor, positions: Tensor, *, silu: bool = True) -> tuple[Tensor, Tensor]:
    """dx and dw: the products of the gradient before SiLU with the weights, and with the tokens that they met."""
    d = _before_silu(dy, x, w, positions, silu)
    taps = w.shape[2]
    dw = torch.stack([(d * _tap(up(x), positions, taps - 1 - i)).sum(0) for i in range(taps)], dim=1)
    return causal_conv_dgrad(dy, x, w, positions, silu=silu), dw[:, None]


def causal_conv_dgrad(dy: Tensor, x: Tensor, w: Tensor, positions: Tensor, *, silu: bool = True) -> Tensor:
    """dx[t, c]: the sum over j of w[c, W - 1 - j] d[t + j, c], for tokens t + j at position j or more."""
    d, dx = _before_silu(dy, x, w, positions, silu), torch.zeros_like(up(x))
    for back in range(min(w.shape[2], len(x))):
        reads = (positions[back:] >= back)[:, None]
        dx[: len(x) - back] += up(w)[:, 0, -1 - back] * d[back:] * reads
    return dx.to(x.dtype)


def _tap(x: Tensor, positions: Tensor, back: int) -> Tensor:
    """Return x[t - back] of each token, 0 where that is in front of its document."""
    moved = F.pad(x, (0, 0, back, 0))[: len(x)]
    return moved * (positions >= back)[:, None]


def _mixed(x: Tensor, w: Tensor, positions: Tensor) -> Tensor:
    taps = (w[:, 0, -1 - back] * _tap(x, positions, back) for back in range(w.shape[2]))
    return torch.stack(list(taps)).sum(0)


def _before_silu(dy: Tensor, x: Tensor, w: Tensor, positions: Tensor, silu: bool) -> Tensor:
    return up(dy) * _silu_slope(_mixed(up(x), up(w), positions)) if silu else up(dy)


def _silu_slope(x: Tensor) -> Tensor:
    return x.sigmoid() * (1 + x * (1 - x.sigmoid()))


# ----------------------------------------------------------------------------------------------------- gated delta rule


class _Tokens(NamedTuple):
    """Inputs of the recurrence, of each value head, chunk and token: [HV, N, 64, ...]. Missing tokens are 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor


class _Masks(NamedTuple):
    """Documents in chunks.

    same   whether token i reads token j of the chunk, [N, 64, 64]
    reads  whether a token is of the document in which the chunk before ended, [N, 64]
    writes whether it is of the document in which the chunk ends, [N, 64]
    """

    same: Tensor
    reads: Tensor
    writes: Tensor


def gated_delta_rule(
    qkv: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    positions: Tensor,
    *,
    n_k_heads: int,
    n_v_heads: int,
    k_dim: int,
    v_dim: int,
) -> tuple[Tensor, Tensor]:
    """The outputs of all tokens, and the transpose of the state in front of each chunk."""
    tokens = _tokens(up(qkv), up(ba), up(a_log), up(dt_bias), (n_k_heads, n_v_heads, k_dim, v_dim))
    masks = _masks(positions)
    state = tokens.k.new_zeros(n_v_heads, k_dim, v_dim)
    outs, states = [], []
    for i in range(len(masks.same)):
        states.append(state.mT)
        out, state = _chunk(_Tokens(*(x[:, i] for x in tokens)), _Masks(*(mask[i] for mask in masks)), state)
        outs.append(out)
    every = torch.cat(outs, dim=1)[:, : len(qkv)].transpose(0, 1)
    return every.reshape(len(qkv), -1).to(qkv.dtype), torch.stack(states).to(qkv.dtype)


def gated_delta_out(
    qkv: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    positions: Tensor,
    *,
    n_k_heads: int,
    n_v_heads: int,
    k_dim: int,
    v_dim: int,
) -> Tensor:
    """The first output of `gated_delta_rule`."""
    heads = {"n_k_heads": n_k_heads, "n_v_heads": n_v_heads, "k_dim": k_dim, "v_dim": v_dim}
    return gated_delta_rule(qkv, ba, a_log, dt_bias, positions, **heads)[0]


def gated_delta_states(
    qkv: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    positions: Tensor,
    *,
    n_k_heads: int,
    n_v_heads: int,
    k_dim: int,
    v_dim: int,
) -> Tensor:
    """The second output of `gated_delta_rule`."""
    heads = {"n_k_heads": n_k_heads, "n_v_heads": n_v_heads, "k_dim": k_dim, "v_dim": v_dim}
    return gated_delta_rule(qkv, ba, a_log, dt_bias, positions, **heads)[1]


@torch.enable_grad()
def gated_delta_rule_bwd(
    dout: Tensor,
    qkv: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    positions: Tensor,
    states: Tensor,
    *,
    n_k_heads: int,
    n_v_heads: int,
    k_dim: int,
    v_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of qkv, ba, a_log and dt_bias.

    Autograd differentiates one chunk at a time, from the last to the first: each from the state in front of it, and
    with the gradient of the state behind it.
    """
    inputs = [up(x).detach().requires_grad_() for x in (qkv, ba, a_log, dt_bias)]
    tokens = _tokens(inputs[0], inputs[1], inputs[2], inputs[3], (n_k_heads, n_v_heads, k_dim, v_dim))
    masks, n = _masks(positions), len(states)
    short = n * CHUNK - len(qkv)
    douts = F.pad(up(dout).view(len(qkv), n_v_heads, v_dim).transpose(0, 1), (0, 0, 0, short))
    d_state = torch.zeros_like(up(states[0]).mT)
    gradients: list[tuple[Tensor, ...]] = []
    for i in reversed(range(n)):
        chunk = _Tokens(*(x[:, i].detach().requires_grad_() for x in tokens))
        state = up(states[i]).mT.detach().requires_grad_()
        made = _chunk(chunk, _Masks(*(mask[i] for mask in masks)), state)
        given = douts[:, i * CHUNK : (i + 1) * CHUNK], d_state
        *of_chunk, d_state = torch.autograd.grad(made, (*chunk, state), given)
        gradients.append(tuple(of_chunk))
    d_tokens = [torch.stack(parts[::-1], dim=1) for parts in zip(*gradients, strict=True)]
    dqkv, dba, da_log, ddt_bias = torch.autograd.grad(tokens, inputs, d_tokens)
    return dqkv.to(qkv.dtype), dba.to(ba.dtype), da_log.to(dqkv.dtype), ddt_bias.to(dqkv.dtype)


def _tokens(qkv: Tensor, ba: Tensor, a_log: Tensor, dt_bias: Tensor, sizes: tuple[int, int, int, int]) -> _Tokens:
    key_heads, heads, k_dim, v_dim = sizes
    count = len(qkv)
    q, k, v = qkv.split([key_heads * k_dim, key_heads * k_dim, heads * v_dim], dim=1)
    q, k = (
        _normed(x.view(count, key_heads, k_dim)).repeat_interleave(heads // key_heads, dim=1).transpose(0, 1)
        for x in (q, k)
    )
    b, a = ba.T.split(heads)
    g = -a_log.exp()[:, None] * F.softplus(a + dt_bias[:, None])
    every = (q * k_dim**-0.5, k, v.view(count, heads, v_dim).transpose(0, 1), b.sigmoid(), g)
    return _Tokens(*map(_in_chunks, every))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _in_chunks(x: Tensor) -> Tensor:
    """Divide x [HV, T, ...] into chunks, with zeros behind the last token."""
    heads, count, *rest = x.shape
    n = -(-count // CHUNK)
    missing = x.new_zeros(heads, n * CHUNK - count, *rest)
    return torch.cat((x, missing), dim=1).view(heads, n, CHUNK, *rest)


def _masks(positions: Tensor) -> _Masks:
    """Missing tokens behind the last one are of its document: they are 0, so that nothing reads them."""
    starts = F.pad((positions == 0).long(), (0, -len(positions) % CHUNK))
    document = starts.cumsum(0).view(-1, CHUNK)
    before = F.pad(document[:-1, -1], (1, 0))
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    same = (document[:, :, None] == document[:, None]) & lower
    return _Masks(same, document == before[:, None], document == document[:, -1:])


def _chunk(x: _Tokens, mask: _Masks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk, [HV, 64, DV], and the state behind it. The tensors are those of one chunk."""
    decay = (mask.same.to(x.g.dtype) @ x.g[..., None])[..., 0]
    end = decay[:, -1:]
    between = (decay[:, :, None] - decay[:, None]).masked_fill(~mask.same, -torch.inf).exp()
    reads, writes = decay.exp() * mask.reads, (end - decay).masked_fill(~mask.writes, -torch.inf).exp()
    carried = end.exp() * mask.reads[-1]
    system = x.beta[..., None] * (x.k @ x.k.mT) * between
    wanted = x.beta[..., None] * (x.v - reads[..., None] * (x.k @ state))
    new = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = reads[..., None] * (x.q @ state) + (x.q @ x.k.mT * between) @ new
    return out, carried[..., None] * state + (writes[..., None] * x.k).mT @ new


# ---------------------------------------------------------------------------------------------------------------- gates


def gated_rmsnorm(x: Tensor, gate: Tensor, w: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """x rstd w silu(gate) of each head, rstd = 1 / sqrt(mean(x^2) + eps)."""
    heads, gates = _heads(up(x), len(w)), _heads(up(gate), len(w))
    rstd = torch.rsqrt(heads.square().mean(-1) + eps)
    return (heads * rstd[..., None] * up(w) * F.silu(gates)).view_as(x).to(x.dtype), rstd


def gated_rmsnorm_bwd(dy: Tensor, x: Tensor, gate: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx and dgate of `gated_rmsnorm_dgrad`; dw is the sum of dy x rstd silu(gate) over tokens and heads."""
    d, normed, gates = _heads(up(dy), len(w)), _heads(up(x), len(w)) * rstd[..., None], _heads(up(gate), len(w))
    return *gated_rmsnorm_dgrad(dy, x, gate, w, rstd), (d * normed * F.silu(gates)).sum((0, 1))


def gated_rmsnorm_dgrad(dy: Tensor, x: Tensor, gate: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx = rstd (d - n mean(d n)) with n = x rstd and d = dy w silu(gate); dgate = dy n w silu'(gate)."""
    dy, normed, gates = _heads(up(dy), len(w)), _heads(up(x), len(w)) * rstd[..., None], _heads(up(gate), len(w))
    d = dy * up(w) * F.silu(gates)
    dx = rstd[..., None] * (d - normed * (d * normed).mean(-1, keepdim=True))
    dgate = dy * normed * up(w) * _silu_slope(gates)
    return dx.view_as(x).to(x.dtype), dgate.view_as(gate).to(gate.dtype)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(len(x), -1, head_dim)


def split_gate(x: Tensor, *, n_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The queries, followed by the other columns, and the gates."""
    width = n_heads * head_dim
    query, gate = x[:, : 2 * width].unflatten(1, (n_heads, 2, head_dim)).unbind(2)
    return torch.cat((query.flatten(1), x[:, 2 * width :]), dim=1), gate.flatten(1)


def join_gate(qkv: Tensor, gate: Tensor, *, n_heads: int, head_dim: int) -> Tensor:
    """The columns of which `split_gate` makes qkv and gate."""
    width = n_heads * head_dim
    both = torch.stack((_heads(qkv[:, :width], head_dim), _heads(gate, head_dim)), dim=2)
    return torch.cat((both.flatten(1), qkv[:, width:]), dim=1)


def split_key_heads(
    qkvz: Tensor, ba: Tensor, *, n_k_heads: int, n_v_heads: int, k_dim: int, v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; the gates z; b and a: each of all heads."""
    shared = n_v_heads // n_k_heads
    widths = [k_dim, k_dim, shared * v_dim, shared * v_dim]
    q, k, v, z = (part.flatten(1) for part in qkvz.unflatten(1, (n_k_heads, sum(widths))).split(widths, dim=2))
    sorted_ba = ba.unflatten(1, (n_k_heads, 2, shared)).transpose(1, 2).flatten(1)
    return torch.cat((q, k, v), dim=1), z.contiguous(), sorted_ba.contiguous()


def join_key_heads(
    qkv: Tensor, z: Tensor, ba: Tensor, *, n_k_heads: int, n_v_heads: int, k_dim: int, v_dim: int
) -> tuple[Tensor, Tensor]:
    """The columns of which `split_key_heads` makes qkv, z and ba."""
    keys = n_k_heads * k_dim
    parts = (*qkv.split([keys, keys, n_v_heads * v_dim], dim=1), z)
    qkvz = torch.cat([part.unflatten(1, (n_k_heads, -1)) for part in parts], dim=2).flatten(1)
    return qkvz, ba.unflatten(1, (2, n_k_heads, -1)).transpose(1, 2).flatten(1).contiguous()


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x sigmoid(gate)."""
    return (up(x) * up(gate).sigmoid()).to(x.dtype)


def sigmoid_gate_bwd(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """dx = dy s and dgate = dy x s (1 - s), with s = sigmoid(gate)."""
    opened = up(gate).sigmoid()
    dgate = up(dy) * up(x) * opened * (1 - opened)
    return (up(dy) * opened).to(x.dtype), dgate.to(gate.dtype)
