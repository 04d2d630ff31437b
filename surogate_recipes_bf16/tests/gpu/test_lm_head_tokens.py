"""The LM head for losses of tokens, bound through its KernelDef and compared with fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import relative_error
from surogate_recipes_bf16.kernels import token_loss

from .test_lm_head import exact_inputs, value
from .test_loss import TORCH, random_targets

pytestmark = pytest.mark.gpu

ROWS = ("log_probs", "logsumexp", "mean_logit")


def rows_of(names: Sequence[str], tokens: int) -> tuple[Value, ...]:
    return tuple(value(name, (tokens,), "fp32") for name in names)


def truth(x: Tensor, w: Tensor, targets: Tensor, softcap: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits rounded to the dtype of x and capped, and the three outputs in fp64; 0 without a label."""
    logits, labelled = (x.double() @ w.double().T).to(x.dtype).double(), targets >= 0
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    picked = logits.log_softmax(-1).gather(1, targets.clamp(min=0).long()[:, None])[:, 0]
    return logits, picked * labelled, logits.logsumexp(-1) * labelled, logits.mean(-1) * labelled


def heads(x: Tensor, w: Tensor, targets: Tensor, dtype: str) -> tuple[tuple[Value, ...], dict[Value, Tensor]]:
    ins = (value("x", x.shape, dtype), value("w", w.shape, dtype), value("targets", targets.shape, "int32"))
    return ins, dict(zip(ins, (x, w, targets), strict=True))


SIZES = cases([(64, 64, 1000, 1), (64, 64, 1000, 4), (36, 40, 777, 3), (15, 13, 101, 5)], more=[(512, 256, 151_936, 2)])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_statistics_match_fp64(sizes: tuple[int, int, int, int], softcap: float, dtype: str) -> None:
    tokens, d_model, vocab_size, chunks = sizes
    x, w = exact_inputs(tokens, d_model, vocab_size, dtype)
    targets = random_targets(tokens, vocab_size)
    ins, contents = heads(x, w, targets, dtype)
    op = Op("lm_head_tokens", ins, rows_of(ROWS, tokens), {"chunks": chunks, "softcap": softcap})
    found = [out.cuda() for out in run_kernel(token_loss.KERNELS, op, contents, labels=int((targets >= 0).sum()))]
    for ours, theirs in zip(found, truth(x, w, targets, softcap)[1:], strict=True):
        # fp32 sums of `vocab_size` terms in a tree, and one exponential and logarithm
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        assert not ours[targets < 0].any(), "a row without a label has a number"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dw_dtype", [None, "fp32", "bf16"])
@pytest.mark.parametrize(("added", "softcap"), [(None, 0.0), (None, 2.0), (0.5, 0.0)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_match_fp64(
    sizes: tuple[int, int, int, int], added: float | None, softcap: float, dw_dtype: str | None, dtype: str
) -> None:
    if added is not None and dw_dtype != "fp32":
        pytest.skip("accumulates into fp32 alone")
    tokens, d_model, vocab_size, chunks = sizes
    x, w = exact_inputs(tokens, d_model, vocab_size, dtype)
    targets = random_targets(tokens, vocab_size)
    logits, _, logsumexp, _ = truth(x, w, targets, softcap)
    a, b, c = (torch.randn(tokens, device="cuda") / 64 for _ in range(3))
    c *= vocab_size**0.5  # so that its part of the gradient counts
    head, contents = heads(x, w, targets, dtype)
    rows = rows_of(("logsumexp", "d_log_probs", "d_logsumexp", "d_mean"), tokens)
    contents |= dict(zip(rows, (logsumexp.float(), a, b, c), strict=True))
    outs = (value("dx", x.shape, dtype), value("dw", w.shape, dw_dtype or "fp32"))[: 2 if dw_dtype else 1]
    kind = "lm_head_tokens_bwd" if dw_dtype else "lm_head_tokens_dgrad"
    sums = frozenset() if added is None else frozenset({1})
    op = Op(kind, (*head, *rows), outs, {"chunks": chunks, "softcap": softcap}, accumulate=sums)
    if added is not None:
        contents[outs[1]] = torch.full(outs[1].shape, added, dtype=TORCH["fp32"])
    dx, *dw = (out.cuda() for out in run_kernel(token_loss.KERNELS, op, contents, labels=int((targets >= 0).sum())))
    gradient = logits.softmax(-1) * (b - a).double()[:, None] + (c.double() / vocab_size)[:, None]
    gradient[torch.arange(tokens), targets.clamp(min=0).long()] += a.double()
    if softcap:
        gradient *= 1 - (logits / softcap).square()
    gradient = (gradient * (targets >= 0)[:, None]).to(x.dtype).double()
    own = 2e-4 if dtype == "bf16" else 1e-5  # see test_lm_head.check
    assert relative_error(dx, gradient @ w.double()) < own + (2.0**-9 if dtype == "bf16" else 0)
    assert not dx[targets < 0].any(), "a row without a label has a gradient"
    if dw:
        # every chunk rounds the sum so far, with random signs
        rounding = chunks**0.5 * 2.0**-9 if dw_dtype == "bf16" else 0
        assert relative_error(dw[0], gradient.T @ x.double() + (added or 0.0)) < own + rounding
