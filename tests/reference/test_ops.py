"""The references of the standard ops, compared with torch's own functions and with one document at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.reference import attention, collectives, ops

ROUNDING = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8}
"""Largest relative error of rounding to nearest."""

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(got: Tensor, exact: Tensor, terms: int, *, roundings: int = 1) -> None:
    """Check the relative error of `got` in the 2-norm.

    The bound is `roundings` roundings to its dtype and `terms` roundings of the arithmetic, which is fp32 or fp64.
    """
    arithmetic = torch.float64 if got.dtype == torch.float64 else torch.float32
    bound = roundings * ROUNDING[got.dtype] + terms * ROUNDING[arithmetic]
    assert (got.double() - exact.double()).norm() <= bound * exact.double().norm()


# ----------------------------------------------------------------------------------------------------------- attention

HEADS = [(2, 2, 4), (4, 2, 6), (6, 1, 2), (3, 3, 1)]
DOCUMENTS = [[0, 12], [0, 1, 2, 12], [0, 5, 5, 9, 12, 12, 12], [0, 3, 6, 9, 12], list(range(13))]


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"window": 3},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 0.75},
    "all": {"window": 4, "scale": 1.5, "softcap": 2.0},
}
"""Scores other than q k^T / sqrt(D) of all keys."""


def by_definition(qkv: Tensor, cu: list[int], heads: int, groups: int, size: int, **variant: Any) -> Tensor:
    """Attend query by query: to the last `window` keys of its document, with scaled and capped scores."""
    window, cap = variant.get("window", qkv.shape[0]), variant.get("softcap", 0.0)
    q, k, v = (x.unflatten(1, (-1, size)) for x in qkv.split([heads * size, groups * size, groups * size], dim=1))
    rows = []
    for start, end in pairwise(cu):
        for i in range(start, end):
            seen = slice(max(start, i - window + 1), i + 1)
            keys, values = (x[seen].repeat_interleave(heads // groups, dim=1) for x in (k, v))
            scores = (keys * q[i]).sum(-1) * variant.get("scale", size**-0.5)
            scores = cap * (scores / cap).tanh() if cap else scores
            rows.append((scores.softmax(0)[..., None] * values).sum(0).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_with_window_scale_and_cap_is_its_definition_with_its_gradient(variant: str) -> None:
    heads, groups, size, cu = 4, 2, 6, [0, 5, 5, 12]
    qkv, dout = 2 * random(12, 48, dtype=torch.float64), random(12, 24, dtype=torch.float64)
    attrs = {"n_heads": heads, "n_kv_heads": groups, "head_dim": size, "seq_len": 12, **VARIANTS[variant]}
    documents = torch.tensor(cu, dtype=torch.int32)
    out, lse = attention.attention(qkv, documents, **attrs)
    leaf = qkv.clone().requires_grad_()
    exact = by_definition(leaf, cu, heads, groups, size, **VARIANTS[variant])
    (gradient,) = torch.autograd.grad(exact, leaf, dout)
    close(out, exact.detach(), terms=40)
    close(attention.attention_bwd(dout, qkv, out, lse, documents, **attrs), gradient, terms=100)


def test_a_window_as_long_as_the_documents_changes_no_bit() -> None:
    attrs = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "seq_len": 12}
    qkv, documents = random(12, 48), torch.tensor([0, 5, 12], dtype=torch.int32)
    whole, windowed = (attention.attention(qkv, documents, **attrs, **more)[0] for more in ({}, {"window": 7}))
    assert torch.equal(whole, windowed)


def one_at_a_time(qkv: Tensor, cu: list[int], heads: int, groups: int, size: int) -> tuple[Tensor, Tensor]:
    """Apply torch's SDPA to each document separately, with repeated key/value heads.

    Returns the outputs and the log-sum-exp of the masked scores.
    """
    q, k, v = qkv.split([heads * size, groups * size, groups * size], dim=1)
    outs, lses = [], []
    for start, end in pairwise(cu):
        if start == end:
            continue
        qh, kh, vh = (x[start:end].unflatten(1, (-1, size)).transpose(0, 1) for x in (q, k, v))
        kh, vh = (x.repeat_interleave(heads // groups, dim=0) for x in (kh, vh))
        outs.append(F.scaled_dot_product_attention(qh, kh, vh, is_causal=True).transpose(0, 1).flatten(1))
        scores = (qh @ kh.transpose(1, 2)) / size**0.5
        lses.append(
            scores.masked_fill(~torch.ones_like(scores[0], dtype=torch.bool).tril(), float("-inf")).logsumexp(-1)
        )
    return torch.cat(outs), torch.cat(lses, dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cu", DOCUMENTS, ids=str)
@pytest.mark.parametrize(("heads", "groups", "size"), HEADS)
def test_attention_is_sdpa_of_each_document(
    heads: int, groups: int, size: int, cu: list[int], dtype: torch.dtype
) -> None:
    """Compares with the same inputs in fp64. Sums have at most 12 weights and 6 products."""
    qkv = random(12, (heads + 2 * groups) * size, dtype=dtype)
    attrs = {"n_heads": heads, "n_kv_heads": groups, "head_dim": size, "seq_len": 12}
    out, lse = attention.attention(qkv, torch.tensor(cu, dtype=torch.int32), **attrs)
    exact_out, exact_lse = one_at_a_time(qkv.double(), cu, heads, groups, size)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(out, exact_out, terms=40)
    close(lse, exact_lse, terms=40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cu", DOCUMENTS, ids=str)
@pytest.mark.parametrize(("heads", "groups", "size"), HEADS)
def test_attention_backward_is_that_of_sdpa(
    heads: int, groups: int, size: int, cu: list[int], dtype: torch.dtype
) -> None:
    """`out` enters rounded, and its product with dout is taken off every score: three roundings to the dtype."""
    qkv, dout = random(12, (heads + 2 * groups) * size, dtype=dtype), random(12, heads * size, dtype=dtype, seed=1)
    attrs = {"n_heads": heads, "n_kv_heads": groups, "head_dim": size, "seq_len": 12}
    documents = torch.tensor(cu, dtype=torch.int32)
    dqkv = attention.attention_bwd(dout, qkv, *attention.attention(qkv, documents, **attrs), documents, **attrs)
    leaf = qkv.double().requires_grad_()
    (one_at_a_time(leaf, cu, heads, groups, size)[0] * dout.double()).sum().backward()
    assert dqkv.dtype == dtype
    assert leaf.grad is not None
    close(dqkv, leaf.grad, terms=100, roundings=3)


def test_no_token_attends_across_documents() -> None:
    """Changing one document leaves results and gradients of the others bit-identical."""
    attrs = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "seq_len": 12}
    cu = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    qkv, dout = random(12, 48), random(12, 24, seed=1)
    changed = qkv.clone()
    changed[5:9] = 100 * random(4, 48, seed=2)
    results = []
    for x in (qkv, changed):
        out, lse = attention.attention(x, cu, **attrs)
        results.append((out, lse.T, attention.attention_bwd(dout, x, out, lse, cu, **attrs)))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:5], after[:5])
        assert torch.equal(before[9:], after[9:])
        assert not torch.equal(before[5:9], after[5:9])


@pytest.mark.parametrize("bias", [0.0, 10.0, 100.0])
def test_attention_of_keys_that_are_nearly_alike_is_as_exact_as_torchs(bias: float) -> None:
    """Keys share a component of `bias` standard deviations, as the key biases of published Qwen2.5 models give them.
    What is left of it must cancel: errors of outputs and of each gradient are those of torch's autograd in fp32."""
    heads, groups, size, cu = 4, 2, 16, [0, 16, 64]
    attrs = {"n_heads": heads, "n_kv_heads": groups, "head_dim": size, "seq_len": 64}
    pieces = [heads * size, groups * size, groups * size]
    ratios = []
    for seed in range(8):
        qkv, dout = random(64, sum(pieces), seed=seed), random(64, pieces[0], seed=100 + seed)
        qkv[:, pieces[0] : pieces[0] + pieces[1]] += bias * random(1, pieces[1], seed=200 + seed)
        qkv[:, : pieces[0]] *= 0.1
        results = []
        for dtype in (torch.float64, torch.float32):
            leaf = qkv.to(dtype, copy=True).requires_grad_()
            out = one_at_a_time(leaf, cu, heads, groups, size)[0]
            (gradient,) = torch.autograd.grad(out, leaf, dout.to(dtype))
            results.append([out.detach(), *gradient.split(pieces, dim=1)])
        documents = torch.tensor(cu, dtype=torch.int32)
        out, lse = attention.attention(qkv, documents, **attrs)
        ours = [out, *attention.attention_bwd(dout, qkv, out, lse, documents, **attrs).split(pieces, dim=1)]
        exact, torchs = results
        errors = [[float((a.double() - b).norm()) for a, b in zip(x, exact, strict=True)] for x in (ours, torchs)]
        ratios.append([mine / other for mine, other in zip(*errors, strict=True)])
    mean = torch.tensor(ratios).mean(0)
    assert mean.max() < 1.4, mean


def test_large_scores_do_not_overflow() -> None:
    attrs = {"n_heads": 1, "n_kv_heads": 1, "head_dim": 4, "seq_len": 8}
    cu = torch.tensor([0, 8], dtype=torch.int32)
    qkv = 1e4 * random(8, 12)
    out, lse = attention.attention(qkv, cu, **attrs)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert attention.attention_bwd(random(8, 4), qkv, out, lse, cu, **attrs).isfinite().all()


# ----------------------------------------------------------------------------------- norms, SwiGLU, products, embedding


def backward(function: Callable[..., Tensor], dy: Tensor, *ins: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of `function`, computed by torch autograd in fp64."""
    leaves = [x.double().requires_grad_() for x in ins]
    return torch.autograd.grad(function(*leaves), leaves, dy.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rmsnorm_and_its_backward_are_torchs(scale: float, dtype: torch.dtype) -> None:
    x, w, dy = scale * random(9, 32, dtype=dtype), random(32, dtype=dtype), random(9, 32, dtype=dtype, seed=3)
    x = x.to(dtype)
    norm, rstd = ops.rmsnorm(x, w, eps=1e-5)
    close(norm, F.rms_norm(x.double(), (32,), w.double(), 1e-5), terms=40)
    close(rstd, (x.double().square().mean(1) + 1e-5).rsqrt(), terms=40)
    dx, dw = ops.rmsnorm_bwd(dy, x, w, rstd)
    exact_dx, exact_dw = backward(lambda x, w: F.rms_norm(x, (32,), w, 1e-5), dy, x, w)
    close(dx, exact_dx, terms=80)
    close(dw, exact_dw, terms=80)
    assert dw.dtype == rstd.dtype
    dresidual = random(9, 32, dtype=dtype, seed=4)
    close(ops.rmsnorm_bwd(dy, x, w, rstd, dresidual)[0], exact_dx + dresidual.double(), terms=80)
    assert all(map(torch.equal, ops.rmsnorm_bwd_recompute(dy, x, w, rstd), (dx, dw, norm)))
    assert all(map(torch.equal, ops.rmsnorm_dgrad_recompute(dy, x, w, rstd), (dx, norm)))


def test_the_offset_of_a_norm_is_added_to_its_weight_before_anything_is_rounded() -> None:
    """A weight of 2^-12 beside 1 is lost in bf16, not in a norm of bf16 values."""
    x, w = random(9, 32, dtype=torch.bfloat16), torch.full((32,), 2.0**-12, dtype=torch.bfloat16)
    dy, residual = random(9, 32, dtype=torch.bfloat16, seed=3), random(9, 32, dtype=torch.bfloat16, seed=4)
    wide = 1 + w.float()
    norm, rstd = ops.rmsnorm(x.float(), w.float(), eps=1e-5, offset=1.0)
    assert torch.equal(norm, ops.rmsnorm(x.float(), wide, eps=1e-5)[0])
    assert not torch.equal(norm, ops.rmsnorm(x.float(), torch.ones(32), eps=1e-5)[0])
    assert torch.equal(ops.rmsnorm(x, w, eps=1e-5, offset=1.0)[0], norm.bfloat16())
    both = [
        ops.add_rmsnorm(x.float(), residual.float(), v, eps=1e-5, offset=o) for v, o in ((w.float(), 1.0), (wide, 0.0))
    ]
    assert all(map(torch.equal, *both))
    given = (dy.float(), x.float())
    for backward_of in (ops.rmsnorm_bwd_recompute, ops.rmsnorm_dgrad_recompute):
        assert all(map(torch.equal, backward_of(*given, w.float(), rstd, offset=1.0), backward_of(*given, wide, rstd)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rmsnorm_is_the_norm_of_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual, w = random(9, 32, dtype=dtype), random(9, 32, dtype=dtype, seed=1), random(32, dtype=dtype)
    norm, rstd, total = ops.add_rmsnorm(x, residual, w, eps=1e-5)
    assert torch.equal(total, x + residual)
    again, rstd_again = ops.rmsnorm(total, w, eps=1e-5)
    assert torch.equal(norm, again)
    assert torch.equal(rstd, rstd_again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_and_its_backward_are_torchs(dtype: torch.dtype) -> None:
    gate_up, dy = 3 * random(9, 32, dtype=dtype), random(9, 16, dtype=dtype, seed=1)

    def exact(x: Tensor) -> Tensor:
        return F.silu(x[:, :16]) * x[:, 16:]

    close(ops.swiglu(gate_up), exact(gate_up.double()), terms=8)
    close(ops.swiglu_bwd(dy, gate_up), backward(exact, dy, gate_up)[0], terms=16)
    both = ops.swiglu_bwd_recompute(dy, gate_up)
    assert torch.equal(both[0], ops.swiglu_bwd(dy, gate_up)) and torch.equal(both[1], ops.swiglu(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_rounded_once(dtype: torch.dtype) -> None:
    x, w, bias, dy = (random(*s, dtype=dtype) for s in ((9, 64), (5, 64), (5,), (9, 5)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = ops.linear(x, w, bias)
    assert y.dtype == dtype
    close(y, F.linear(x.double(), w.double(), bias.double()), terms=64)
    assert ops.linear(x, w, bias, dtype="fp32").dtype == torch.float32
    exact = backward(F.linear, dy, x, w, bias)
    results = (ops.linear_dgrad(dy, w), ops.linear_wgrad(dy, x), ops.linear_bgrad(dy))
    for got, want, result_dtype in zip(results, exact, (dtype, wide, wide), strict=True):
        assert got.dtype == result_dtype
        close(got, want, terms=64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_moves_rows_and_its_backward_sums_them(dtype: torch.dtype) -> None:
    tokens = torch.tensor([3, 0, 3, 3, 6], dtype=torch.int32)
    w, dy = random(7, 4, dtype=dtype), random(5, 4, dtype=dtype)
    assert torch.equal(ops.embedding(tokens, w), w[tokens.long()])
    dw = ops.embedding_bwd(dy, tokens, vocab_size=7)
    close(dw, backward(lambda w: F.embedding(tokens.long(), w), dy, w)[0], terms=4)
    assert not dw[[1, 2, 4, 5]].any()


# ---------------------------------------------------------------------------------------------- head and cross-entropy

BOTH = (0, 1)
TARGETS = torch.tensor([2, -100, 0, -100, -100, -100, 10, 10, -100, 3, 4, -100], dtype=torch.int32)


def exact_loss(x: Tensor, w: Tensor) -> Tensor:
    return 0.25 * F.cross_entropy(x @ w.T, TARGETS.long(), ignore_index=-100, reduction="sum")


def head(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random(12, 16, dtype=dtype), random(11, 16, dtype=dtype)


@pytest.mark.parametrize("chunks", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_cross_entropy_and_its_gradients_are_torchs_in_any_number_of_chunks(dtype: torch.dtype, chunks: int) -> None:
    x, w = head(dtype)
    scale = torch.tensor(0.25)
    loss, dx, dw = ops.lm_head_ce_grads(x, w, TARGETS, scale, chunks=chunks, wrt=BOTH)
    exact = backward(exact_loss, torch.ones(()), x, w)
    close(loss, exact_loss(x.double(), w.double()), terms=50)
    close(ops.lm_head_ce(x, w, TARGETS, scale, chunks=chunks), exact_loss(x.double(), w.double()), terms=50)
    close(dx, exact[0], terms=50)
    close(dw, exact[1], terms=50)


def test_cross_entropy_of_capped_logits_and_its_gradients_are_torchs() -> None:
    def exact(x: Tensor, w: Tensor) -> Tensor:
        capped = 1.5 * (x @ w.T / 1.5).tanh()
        return 0.25 * F.cross_entropy(capped, TARGETS.long(), ignore_index=-100, reduction="sum")

    x, w = head(torch.float64)
    loss, dx, dw = ops.lm_head_ce_grads(x, w, TARGETS, torch.tensor(0.25), chunks=3, wrt=BOTH, softcap=1.5)
    close(loss, exact(x, w), terms=50)
    close(ops.lm_head_ce(x, w, TARGETS, torch.tensor(0.25), chunks=3, softcap=1.5), exact(x, w), terms=50)
    for got, want in zip((dx, dw), backward(exact, torch.ones(()), x, w), strict=True):
        close(got, want, terms=50)


@pytest.mark.parametrize("chunks", [1, 4])
def test_cross_entropy_in_bf16_rounds_logits_and_their_gradient(chunks: int) -> None:
    """Logits of magnitude 4 are rounded to 2^-7, so the loss errs by at most that much per row. The gradients have a
    relative error of the same size, plus two roundings."""
    x, w = head(torch.bfloat16)
    loss, dx, dw = ops.lm_head_ce_grads(x, w, TARGETS, torch.tensor(0.25), chunks=chunks, wrt=BOTH)
    assert (loss.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    exact = backward(exact_loss, torch.ones(()), x, w)
    assert abs(float(loss) - float(exact_loss(x.double(), w.double()))) < 6 * 0.25 * 2**-6
    for got, want in zip((dx, dw), exact, strict=True):
        assert (got.double() - want).norm() < 4 * 2**-8 * want.norm()


@pytest.mark.parametrize("chunks", [1, 3, 12])
def test_unlabelled_rows_have_no_effect(chunks: int) -> None:
    x, w = head(torch.float32)
    poisoned = x.clone()
    poisoned[TARGETS < 0] = float("nan")
    scale = torch.tensor(0.25)
    clean, dirty = (ops.lm_head_ce_grads(v, w, TARGETS, scale, chunks=chunks, wrt=BOTH) for v in (x, poisoned))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    assert not clean[1][TARGETS < 0].any()
    assert torch.equal(
        ops.lm_head_ce(x, w, TARGETS, scale, chunks=chunks), ops.lm_head_ce(poisoned, w, TARGETS, scale, chunks=chunks)
    )


def test_without_any_label_loss_and_gradients_are_zero() -> None:
    x, w = head(torch.bfloat16)
    none = torch.full((12,), -100, dtype=torch.int32)
    assert ops.lm_head_ce(x, w, none, torch.tensor(1.0), chunks=3) == 0
    assert not any(result.any() for result in ops.lm_head_ce_grads(x, w, none, torch.tensor(1.0), chunks=3, wrt=BOTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_omitting_a_gradient_leaves_the_other_results_bit_identical(dtype: torch.dtype) -> None:
    x, w = head(dtype)
    whole = ops.lm_head_ce_grads(x, w, TARGETS, torch.tensor(0.25), chunks=3, wrt=BOTH)
    for i in BOTH:
        loss, gradient = ops.lm_head_ce_grads(x, w, TARGETS, torch.tensor(0.25), chunks=3, wrt=(i,))
        assert torch.equal(loss, whole[0]) and torch.equal(gradient, whole[1 + i])


def test_large_logits_do_not_overflow() -> None:
    x, w = head(torch.float32)
    results = ops.lm_head_ce_grads(1e4 * x, w, TARGETS, torch.tensor(1.0), chunks=1, wrt=BOTH)
    assert all(result.isfinite().all() for result in results)


# ------------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1e6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clipping_is_torchs(max_norm: float, dtype: torch.dtype) -> None:
    grads = [random(*shape, dtype=dtype) for shape in ((3, 5), (7,), (), (64, 2))]
    params = [torch.zeros_like(g, dtype=torch.float64).requires_grad_() for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.double().clone()
    total = torch.nn.utils.clip_grad_norm_(params, max_norm)
    norm, coef = collectives.global_norm(*grads, max_norm=max_norm)
    assert norm.dtype == coef.dtype == torch.float32
    close(norm, total, terms=20)
    for param, grad in zip(params, grads, strict=True):
        assert param.grad is not None
        close(grad.float() * coef, param.grad, terms=20)


def test_max_norm_zero_means_no_clipping() -> None:
    norm, coef = collectives.global_norm(100 * random(5), max_norm=0.0)
    assert norm > 1
    assert coef == 1


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e38])
def test_a_norm_that_is_not_finite_gives_a_nan_coefficient(bad: float, max_norm: float) -> None:
    """1e38 squared overflows in fp32. Either the norm avoids the overflow or the step must be skipped too."""
    gradient = random(5)
    gradient[2] = bad
    norm, coef = collectives.global_norm(random(3), gradient, max_norm=max_norm)
    assert coef.isnan() != norm.isfinite()
    assert bad == 1e38 or coef.isnan()


def test_no_reference_writes_to_its_inputs() -> None:
    x, w = head(torch.float32)
    grads, scale = random(12, 11), torch.tensor(0.25)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    attrs = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "seq_len": 12}
    norm_weight = random(16)
    rstd = ops.rmsnorm(x, norm_weight, eps=1e-5)[1]
    out, lse = attention.attention(x, cu, **attrs)
    calls: list[tuple[Callable[..., object], tuple[Tensor, ...], dict[str, object]]] = [
        (ops.linear, (x, w), {}),
        (ops.linear_dgrad, (grads, w), {}),
        (ops.linear_wgrad, (grads, x), {}),
        (ops.rmsnorm, (x, norm_weight), {"eps": 1e-5}),
        (ops.add_rmsnorm, (x, x, norm_weight), {"eps": 1e-5}),
        (ops.rmsnorm_bwd, (x, x, norm_weight, rstd, x), {}),
        (ops.rmsnorm_dgrad, (x, x, norm_weight, rstd, x), {}),
        (attention.attention, (x, cu), attrs),
        (attention.attention_bwd, (random(12, 8), x, out, lse, cu), attrs),
        (ops.swiglu, (x,), {}),
        (ops.swiglu_bwd, (random(12, 8), x), {}),
        (ops.lm_head_ce, (x, w, TARGETS, scale), {"chunks": 3}),
        (ops.lm_head_ce_grads, (x, w, TARGETS, scale), {"chunks": 3, "wrt": BOTH}),
        (ops.embedding_bwd, (x, TARGETS.clamp(min=0)), {"vocab_size": 11}),
        (ops.add, (x, x), {}),
        (collectives.global_norm, (x, w), {"max_norm": 1.0}),
    ]
    for function, ins, kwargs in calls:
        before = [v.clone() for v in ins]
        function(*ins, **kwargs)
        assert all(torch.equal(a, b) for a, b in zip(before, ins, strict=True)), function
