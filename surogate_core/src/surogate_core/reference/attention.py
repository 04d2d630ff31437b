"""Torch references of causal attention over packed documents."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .ops import up
from .rounding import accumulator


def documents(cu_seqlens: Tensor) -> Iterator[Tensor]:
    """Yield the token indices [n, L] of all documents of the same length L, for each length but zero."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
    for length in sorted(set(lengths.tolist()) - {0}):
        yield starts[lengths == length][:, None] + torch.arange(length)


def _heads(x: Tensor, rows: Tensor, n_kv_heads: int, head_dim: int) -> Tensor:
    """[T, heads * D] -> [n, G, heads / G * L, D]: the query heads of a group stacked above each other."""
    n, length = rows.shape
    x = up(x[rows.reshape(-1)]).view(n, length, n_kv_heads, -1, head_dim)
    return x.permute(0, 2, 3, 1, 4).reshape(n, n_kv_heads, -1, head_dim)


def _of_rows(x: Tensor, rows: Tensor, n_kv_heads: int) -> Tensor:
    """[H, T], a number for each query head and token -> [n, G, H / G * L, 1], in the order of `_heads`."""
    n, length = rows.shape
    x = x[:, rows.reshape(-1)].view(-1, n, length).transpose(0, 1)
    return x.reshape(n, n_kv_heads, -1, 1)


def _rows(x: Tensor, length: int) -> Tensor:
    """The inverse of `_heads`: [n, G, R * L, D] -> [n * L, G * R * D]."""
    n, groups, stacked, size = x.shape
    x = x.view(n, groups, stacked // length, length, size)
    return x.permute(0, 3, 1, 2, 4).reshape(n * length, -1)


def _scores(q: Tensor, k: Tensor, length: int, window: int, scale: float | None, softcap: float) -> Tensor:
    """Scaled and capped products [n, G, R * L, L]; -inf above the diagonal, and from the window on below it."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window:
        seen = seen.triu(1 - window)
    return scores.masked_fill(~seen.repeat(q.shape[2] // length, 1), float("-inf"))


def _split(qkv: Tensor, n_heads: int, n_kv_heads: int, head_dim: int) -> list[Tensor]:
    return list(qkv.split([n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim], dim=1))


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    seq_len: int,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document: out = softmax(s) v with s = q k^T / sqrt(D), lse its log-sum-exp per head
    and row.

    window: token i sees the tokens i - window + 1 to i; 0: all up to i. scale: in place of 1 / sqrt(D).
    softcap: s = softcap * tanh(q k^T * scale / softcap); 0: no cap.
    """
    q, k, v = _split(qkv, n_heads, n_kv_heads, head_dim)
    out = torch.empty(qkv.shape[0], n_heads * head_dim, dtype=qkv.dtype)
    lse = torch.empty(n_heads, qkv.shape[0], dtype=accumulator(qkv.dtype))
    for rows in documents(cu_seqlens):
        n, length = rows.shape
        qh, kh, vh = (_heads(x, rows, n_kv_heads, head_dim) for x in (q, k, v))
        scores = _scores(qh, kh, length, window, scale, softcap)
        flat = rows.reshape(-1)
        out[flat] = _rows(scores.softmax(-1) @ vh, length).to(out.dtype)
        lse[:, flat] = scores.logsumexp(-1).view(n, n_heads, length).transpose(0, 1).reshape(n_heads, -1)
    return out, lse


def attention_bwd(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    dlse: Tensor | None = None,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    seq_len: int,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    own: bool = True,
    chunks: int = 1,
) -> Tensor:
    """With s = q k^T / sqrt(D) and dp = dout v^T, by the lse and out that are given:

        p = exp(s - lse);  ds = p * (dp - rowsum(dout * out) + dlse) / sqrt(D);
        dv = p^T dout;  dq = ds k;  dk = ds^T q

    `softcap` multiplies ds by 1 - (s / softcap)^2. dlse: the gradient of lse; none: zeros.

    own: lse and out are those of `attention`, of the same qkv. The rows of p then sum to one, and rowsum(dout * out) is
    rowsum(p * dp), but for rounding: kernels may correct both by sums over the keys, as the reference does. Without
    that, rows of ds do not sum to dlse, and the rest multiplies the component that all keys share: with key biases of
    standard deviation 10 to 100 the error of dq was 2.3 to 4 times that of torch's autograd (at most 6.4).

    False: they are others, of a softmax with more terms than the keys, and nothing is corrected. A sink is a term with
    a value of zero: out' = out * sigmoid(lse - sink), lse' = log(exp(lse) + exp(sink)). The gradient of qkv is then
    this op with dout', out' and lse', and that of a sink is -sum(exp(sink - lse') * rowsum(dout' * out')) over tokens.

    chunks: into how many parts kernels divide the rows; the result does not depend on it.
    """
    q, k, v = _split(qkv, n_heads, n_kv_heads, head_dim)
    dqkv = torch.empty_like(qkv)
    dq, dk, dv = _split(dqkv, n_heads, n_kv_heads, head_dim)
    for rows in documents(cu_seqlens):
        length = rows.shape[1]
        qh, kh, vh, oh, doh = (_heads(x, rows, n_kv_heads, head_dim) for x in (q, k, v, out, dout))
        flat = rows.reshape(-1)
        scores = _scores(qh, kh, length, window, scale, softcap)
        probs = (scores - _of_rows(lse, rows, n_kv_heads)).exp()
        centred = doh @ vh.mT - (doh * oh).sum(-1, keepdim=True)
        if own:
            probs = probs / probs.sum(-1, keepdim=True)
            centred = centred - (probs * centred).sum(-1, keepdim=True)
        if dlse is not None:
            centred = centred + _of_rows(dlse, rows, n_kv_heads)
        ds = probs * centred * (head_dim**-0.5 if scale is None else scale)
        if softcap:
            ds = ds * (1 - (scores.masked_fill(probs == 0, 0.0) / softcap).square())
        for target, grad in ((dq, ds @ kh), (dk, ds.mT @ qh), (dv, probs.mT @ doh)):
            target[flat] = _rows(grad, length).to(dqkv.dtype)
    return dqkv
