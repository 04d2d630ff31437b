"""The LM head for distillation, bound through its KernelDef and compared with fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import relative_error
from surogate_recipes_bf16.kernels import distillation

from .test_lm_head import exact_inputs, value
from .test_loss import TORCH, random_targets

pytestmark = pytest.mark.gpu

SCALE = 0.25
FIGURES = ("loss", "cross_entropy", "divergence")


def teacher(tokens: int, vocab_size: int, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities of the k likeliest tokens of random logits, and that of all others."""
    logits = 3 * torch.randn(tokens, vocab_size, device="cuda", dtype=torch.float64) / temperature
    values, ids = logits.topk(k, -1)
    others = logits.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    log_probs = torch.cat((values, others), 1) - logits.logsumexp(-1, keepdim=True)
    return ids.int(), log_probs.clamp(min=-80).float()


def truth(x: Tensor, w: Tensor, targets: Tensor, ids: Tensor, log_probs: Tensor, o: Any) -> tuple[list[Tensor], Tensor]:
    """Return the figures and the gradient of the logits in fp64, by autograd, with logits rounded to the dtype of x."""
    z = (x.double() @ w.double().T).to(x.dtype).double().requires_grad_()
    labelled = targets >= 0
    cap = o.get("softcap", 0.0)
    y = (cap * (z / cap).tanh() if cap else z)[labelled]
    top, q = ids[labelled].long(), log_probs[labelled].double()
    p = (y / o["temperature"]).log_softmax(-1)
    student = p.gather(1, top)
    if top.shape[1] < w.shape[0]:
        others = p.scatter(1, top, -torch.inf).logsumexp(-1, keepdim=True)
        student = torch.cat((student, others), 1)
    q = q[:, : student.shape[1]]
    weights = student.exp() if o["reverse"] else q.exp()
    divergence = (weights * (student - q if o["reverse"] else q - student)).sum()
    cross_entropy = -y.log_softmax(-1).gather(1, targets[labelled].long()[:, None]).sum()
    loss = (1 - o["weight"]) * cross_entropy + o["weight"] * o["temperature"] ** 2 * divergence
    (gradient,) = torch.autograd.grad(SCALE * loss, z)
    return [SCALE * figure.detach() for figure in (loss, cross_entropy, divergence)], gradient


SIZES = cases([(36, 40, 777, 3), (15, 13, 101, 5)], more=[(64, 64, 1000, 4), (512, 256, 151_936, 2)])
KINDS: list[tuple[int, dict[str, Any]]] = [
    (1, {"weight": 1.0, "temperature": 1.0, "reverse": False}),
    (32, {"weight": 0.5, "temperature": 2.0, "reverse": False, "softcap": 1.5}),
    (101, {"weight": 0.3, "temperature": 0.5, "reverse": True}),
    (32, {"weight": 0.5, "temperature": 2.0, "reverse": True, "softcap": 1.5}),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("dw_dtype", "added"), [("", None), ("x", 0.5), ("fp32", None), ("fp32", 0.5), ("bf16", None)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_figures_and_gradients_match_fp64(
    sizes: tuple[int, int, int, int], kind: tuple[int, dict[str, Any]], dw_dtype: str, added: float | None, dtype: str
) -> None:
    """dw_dtype: "" is the evaluation, without gradients, and "x" a frozen weight."""
    (tokens, d_model, vocab_size, chunks), (k, options) = sizes, kind
    x, w = exact_inputs(tokens, d_model, vocab_size, dtype)
    targets = random_targets(tokens, vocab_size)
    ids, log_probs = teacher(tokens, vocab_size, k, options["temperature"])
    given = (x, w, targets, ids, log_probs, torch.tensor(SCALE))
    dtypes = (dtype, dtype, "int32", "int32", "fp32", "fp32")
    names = ("x", "w", "targets", "ids", "log_probs", "loss_scale")
    ins = tuple(value(name, t.shape, d) for name, t, d in zip(names, given, dtypes, strict=True))
    outs = tuple(value(name, (), "fp32") for name in FIGURES)
    gradients = [value("dx", x.shape, dtype), value("dw", w.shape, dw_dtype if dw_dtype in TORCH else "fp32")]
    wrt = {"": (), "x": (0,)}.get(dw_dtype, (0, 1))
    outs = (*outs, *gradients[: len(wrt)])
    sums = frozenset() if added is None else frozenset({0, 1, 2, 4} & set(range(len(outs))))
    attrs = {"chunks": chunks, **options, **({"wrt": wrt} if wrt else {})}
    op = Op("lm_head_distill_grads" if wrt else "lm_head_distill", ins, outs, attrs, accumulate=sums)
    contents = dict(zip(ins, given, strict=True))
    contents |= {outs[i]: torch.full(outs[i].shape, added or 0.0, dtype=TORCH["fp32"]) for i in sums}
    found = run_kernel(distillation.KERNELS, op, contents, labels=int((targets >= 0).sum()))
    figures, (dx, dw, *_) = found[:3], [*(out.cuda() for out in found[3:]), None, None]
    expected, gradient = truth(x, w, targets, ids, log_probs, options)
    for ours, theirs in zip(figures, expected, strict=True):
        # fp32 sums of `vocab_size` terms in a tree, exponentials and logarithms
        assert float(ours) == pytest.approx(float(theirs) + (added or 0.0), rel=2e-5, abs=1e-6)
    if dx is None:
        return
    gradient = gradient.to(x.dtype).double()
    own = 2e-4 if dtype == "bf16" else 1e-5  # see test_lm_head.check
    assert relative_error(dx, gradient @ w.double()) < own + (2.0**-9 if dtype == "bf16" else 0)
    assert not dx[targets < 0].any(), "a row without a label has a gradient"
    if dw is not None:
        rounding = 2.0**-9 if dw_dtype == "bf16" else 0
        assert relative_error(dw, gradient.T @ x.double() + (added or 0.0)) < own + rounding
