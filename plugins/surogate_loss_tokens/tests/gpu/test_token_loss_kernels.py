"""The kernels of the sums over labels, compared with the references in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.kernels import assert_close
from surogate_loss_tokens import reference
from surogate_loss_tokens.kernels import KERNELS

pytestmark = pytest.mark.gpu

CASES = [(1, False), (37, True), (1024, False), (5000, True), (40_001, False)]
ATTRS = {"smoothing": 0.1, "z": 1e-3}


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities, logsumexps, mean logits and weights: 0 for half of the tokens, without a label."""
    labelled = torch.rand(tokens) < 0.5
    drawn = -10 * torch.rand(tokens), 12 + torch.randn(tokens), torch.randn(tokens), 2 * torch.rand(tokens)
    return tuple(torch.where(labelled, x, 0) for x in drawn)


def values(named: dict[str, Tensor]) -> dict[Value, Tensor]:
    return {Value(name, tuple(x.shape), "fp32", "act"): x for name, x in named.items()}


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("adds", [frozenset(), frozenset({1}), frozenset({0, 1, 2})], ids=len)
@pytest.mark.parametrize(("tokens", "weighted"), CASES)
def test_sums_match_fp64(tokens: int, weighted: bool, adds: frozenset[int], skew: int) -> None:
    log_probs, logsumexp, mean_logit, weights = inputs(tokens)
    scale = torch.rand(())
    given = values({"log_probs": log_probs, "logsumexp": logsumexp, "mean_logit": mean_logit, "scale": scale})
    given |= values({"weights": weights} if weighted else {})
    outs = tuple(Value(name, (), "fp32", "act") for name in ("loss", "z_loss", "cross_entropy"))
    before = {outs[i]: torch.randn(()) for i in sorted(adds)}
    op = Op("token_loss", tuple(given), outs, ATTRS, accumulate=adds)
    found = run_kernel(KERNELS, op, given | before, skew=skew)
    p, lse, mean, *others = (x.double() for x in given.values())
    wanted = reference.token_loss(p, lse, mean, *others, **ATTRS)
    sizes = reference.token_loss(-p.abs(), lse.abs(), -mean.abs(), *others, **ATTRS)  # all terms have one sign
    for out, ours, theirs, size in zip(outs, found, wanted, sizes, strict=True):
        added = before.get(out, torch.zeros(())).double()
        assert_close(ours, theirs + added, torch.float32, tokens // 1024 + 32, size + added.abs())


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize(("tokens", "weighted"), CASES)
def test_gradients_match_fp64(tokens: int, weighted: bool, skew: int) -> None:
    _, logsumexp, _, weights = inputs(tokens)
    scalars = dict(zip(("scale", "d_loss", "d_z_loss", "d_cross_entropy"), torch.randn(4).unbind(), strict=True))
    given = values({"logsumexp": logsumexp, **scalars} | ({"weights": weights} if weighted else {}))
    outs = tuple(Value(name, (tokens,), "fp32", "act") for name in ("d_log_probs", "d_logsumexp", "d_mean_logit"))
    found = run_kernel(KERNELS, Op("token_loss_bwd", tuple(given), outs, ATTRS), given, skew=skew)
    wanted = reference.token_loss_bwd(*(x.double() for x in given.values()), **ATTRS)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours, theirs, torch.float32, 4)
