"""The kernels of documents, pairs and KTO, compared with the references in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.kernels import assert_close, same_bits
from surogate_loss_preference import reference
from surogate_loss_preference.kernels import FORMS, KERNELS

pytestmark = pytest.mark.gpu

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "int32"}


def values(*tensors: Tensor) -> dict[Value, Tensor]:
    return {Value(f"in{i}", tuple(x.shape), _DTYPES[x.dtype], "act"): x for i, x in enumerate(tensors)}


def run(kind: str, ins: dict[Value, Tensor], shapes: Sequence[tuple[int, ...]], **how: Any) -> list[Tensor]:
    dtype = how.pop("dtype", "fp32")
    outs = tuple(Value(f"out{i}", shape, dtype, "act") for i, shape in enumerate(shapes))
    return run_kernel(KERNELS, Op(kind, tuple(ins), outs, how.pop("attrs", {})), ins, **how)


# ----------------------------------------------------------------------------------------------------------- documents

LENGTHS: dict[str, tuple[int, list[int]]] = {  # documents of a group; gaps before documents and their lengths, by turns
    "one": (1, [0, 1]),
    "none": (2, []),
    "pairs": (2, [0, 700, 0, 256, 3, 1, 40, 1500]),
    "alone": (1, [5, 257, 0, 63, 64, 9]),
    "triples": (3, [0, 20, 0, 30, 1, 10]),
}


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("unused", [0, 7])
@pytest.mark.parametrize("tail", [0, 33])
@pytest.mark.parametrize("name", LENGTHS)
def test_sums_over_documents_and_their_gradient(name: str, tail: int, unused: int, skew: int) -> None:
    each, lengths = LENGTHS[name]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)[1:].view(-1, 2)
    tokens, groups = int(ends.max()) if len(ends) else 0, len(ends) // each + unused
    tokens, groups = max(tokens + tail, 1), max(groups, 1)
    spans = torch.zeros(groups, each, 2, dtype=torch.int32)
    spans.view(-1, 2)[: len(ends)] = ends
    targets = torch.where(torch.rand(tokens) < 0.6, torch.randint(99, (tokens,)), -100).to(torch.int32)
    drawn = torch.randn(tokens) - 2
    sums, labels = run("document_sums", values(drawn, targets, spans), [(groups, each)] * 2, skew=skew)
    wanted, counts = reference.document_sums(drawn.double(), targets, spans)
    terms, _ = reference.document_sums(drawn.double().abs(), targets, spans)
    assert_close(sums, wanted, torch.float32, tokens // 256 + 16, terms)
    assert same_bits(labels, counts.float())
    d_sums = torch.randn(groups, each)
    (found,) = run("document_sums_bwd", values(d_sums, targets, spans), [(tokens,)], skew=skew)
    assert same_bits(found, reference.document_sums_bwd(d_sums, targets, spans))


# -------------------------------------------------------------------------------------------------------------- scores

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
PADDING = 3


def scored_documents(count: int) -> tuple[Tensor, Tensor]:
    """Return tokens, and the spans of pairs of documents. Up to 70 tokens at their ends pad, of some documents all."""
    lengths = torch.randint(1, 150, (2 * count,))
    ends = lengths.cumsum(0)
    tokens = torch.randint(4, 99, (int(ends[-1]) + 5,), dtype=torch.int32)
    tokens[torch.rand(len(tokens)) < 0.2] = PADDING
    for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
        tokens[end - min(length, int(torch.randint(71, ()))) : end] = PADDING
    spans = torch.zeros(count + 2, 2, 2, dtype=torch.int32)
    spans.view(-1, 2)[: 2 * count] = torch.stack([ends - lengths, ends], 1)
    return tokens, spans


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 257), (150, 64)])
@pytest.mark.parametrize("other", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_of_documents_and_their_gradients(dtype: str, other: str, count: int, width: int, skew: int) -> None:
    tokens, spans = scored_documents(count)
    x, weight = torch.randn(len(tokens), width).to(FLOATS[dtype]), torch.randn(1, width).to(FLOATS[other])
    attrs, rest = {"padding": PADDING}, (tokens, spans)
    shape = spans.shape[:2]
    scores, used = run("document_scores", values(x, weight, *rest), [shape] * 2, attrs=attrs, skew=skew)
    wanted, expected = reference.document_scores(x.double(), weight.double(), *rest, **attrs)
    terms, _ = reference.document_scores(x.double().abs(), weight.double().abs(), *rest, **attrs)
    assert_close(scores, wanted, torch.float32, width // 256 + 16, terms)
    assert same_bits(used, expected.float())
    d = torch.randn(shape)
    (dx,) = run("document_scores_dgrad", values(d, weight, *rest), [x.shape], attrs=attrs, skew=skew, dtype=dtype)
    assert same_bits(dx, reference.document_scores_dgrad(d, weight, *rest, **attrs, dtype=dtype))
    ins = values(d, x, *rest)
    (dw,) = run("document_scores_wgrad", ins, [(1, width)], attrs=attrs, skew=skew, dtype=other)
    exact = reference.document_scores_wgrad(d.double(), x.double(), *rest, **attrs)
    terms = reference.document_scores_wgrad(d.double().abs(), x.double().abs(), *rest, **attrs)
    assert_close(dw, exact, FLOATS[other], 2 * count, terms)
    if other == "fp32":
        out, before = Value("dw", (1, width), "fp32", "act"), torch.randn(1, width)
        op = Op("document_scores_wgrad", tuple(ins), (out,), attrs, accumulate=frozenset({0}))
        (added,) = run_kernel(KERNELS, op, ins | {out: before}, skew=skew)
        torch.testing.assert_close(added, before + dw, rtol=1e-6, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- pairs

ATTRS: dict[str, dict[str, float]] = {
    "sigmoid": {"beta": 0.1, "smoothing": 0.2, "center": 0.01, "nll": 0.7},
    "hinge": {"beta": 0.05},
    "ipo": {"beta": 0.1},
    "simpo": {"beta": 2.0, "gamma": 0.5},
    "orpo": {"beta": 0.3},
}


PAIR_SHAPES: list[tuple[int, ...]] = [*[()] * 5, (5,)]
KTO_SHAPES: list[tuple[int, ...]] = [*[()] * 5, (2, 3)]


def pairs(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sums, labels, scale and the sums of a reference. About a fifth of the answers have no label."""
    labels = torch.randint(0, 300, (count, 2)).float() * (torch.rand(count, 2) < 0.8)
    sums = -labels * (0.2 + 2 * torch.rand(count, 2))
    return sums, labels, torch.rand(()), sums + 3 * torch.randn(count, 2) * (labels > 0)


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("margined", [False, True])
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("count", [1, 31, 700])
@pytest.mark.parametrize("form", FORMS)
def test_losses_of_pairs_and_their_gradient(
    form: str, count: int, with_reference: bool, margined: bool, skew: int
) -> None:
    attrs: dict[str, Any] = {"form": form, "margined": margined, **ATTRS[form]}
    sums, labels, scale, others = pairs(count)
    given = (sums, labels, scale, *[others] * with_reference, *[torch.rand(count, 2)] * margined)
    found = run("pair_loss", values(*given), PAIR_SHAPES, attrs=attrs, skew=skew)
    exact = [x.double() for x in given]
    wanted = reference.pair_loss(*exact, **attrs)
    one_by_one = [reference.pair_loss(*(x[i : i + 1] if x.shape else x for x in exact), **attrs) for i in range(count)]
    for ours, theirs, each in zip(found, wanted, zip(*one_by_one, strict=True), strict=True):
        bound = largest(exact, scale) + torch.stack([term.abs() for term in each]).sum(0)
        assert_close(ours, theirs, torch.float32, 64, bound)
    d_loss = torch.randn(())
    (d_sums,) = run("pair_loss_bwd", values(d_loss, *given), [(count, 2)], attrs=attrs, skew=skew)
    assert_close(d_sums, reference.pair_loss_bwd(d_loss.double(), *exact, **attrs), torch.float32, 64)


def largest(exact: Sequence[Tensor], scale: Tensor) -> Tensor:
    """The rounding of a difference of sums is that of the sums."""
    return scale.double() * max(x.abs().sum() for x in exact[:1] + exact[3:]) * 1e-3


@pytest.mark.parametrize("adds", [frozenset({0}), frozenset({1, 4}), frozenset({5}), frozenset(range(6))], ids=str)
def test_figures_are_added_where_they_are_asked_for(adds: frozenset[int]) -> None:
    ins = values(*pairs(40))
    attrs = {"form": "sigmoid", "beta": 0.1}
    outs = tuple(Value(f"out{i}", shape, "fp32", "act") for i, shape in enumerate(PAIR_SHAPES))
    before = {outs[i]: torch.randn(outs[i].shape) for i in sorted(adds)}
    alone = run("pair_loss", ins, PAIR_SHAPES, attrs=attrs)
    added = run_kernel(KERNELS, Op("pair_loss", tuple(ins), outs, attrs, accumulate=adds), ins | before)
    for out, ours, sum_ in zip(outs, added, alone, strict=True):
        torch.testing.assert_close(ours, before[out] + sum_ if out in before else sum_, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("certain", [(0.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (-1e-8, -1e-8), (-2000.0, -0.1)])
def test_orpo_of_an_answer_that_is_certain_is_the_reference(certain: tuple[float, float]) -> None:
    attrs: dict[str, Any] = {"form": "orpo", "beta": 0.1}
    given = (torch.tensor([certain]), torch.ones(1, 2), torch.tensor(1.0))
    found = run("pair_loss", values(*given), PAIR_SHAPES, attrs=attrs)
    for ours, theirs in zip(found, reference.pair_loss(*given, **attrs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    one = torch.tensor(1.0)
    (d_sums,) = run("pair_loss_bwd", values(one, *given), [(1, 2)], attrs=attrs)
    torch.testing.assert_close(d_sums, reference.pair_loss_bwd(one, *given, **attrs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_sum_that_is_nan_is_seen(form: str) -> None:
    attrs: dict[str, Any] = {"form": form, "beta": 0.1}
    sums, labels, scale, _ = pairs(9)
    sums[4], labels[4] = torch.tensor([-3.0, float("nan")]), 2
    loss, *_ = run("pair_loss", values(sums, labels, scale), PAIR_SHAPES, attrs=attrs)
    assert loss.isnan()


# ----------------------------------------------------------------------------------------------------------------- KTO

WEIGHTS: dict[str, Any] = {"beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.7}


def answers(count: int, mean: float) -> tuple[Tensor, ...]:
    """Return sums, labels, scale, the sums of a reference, what is desirable, and a mean of log ratios."""
    sums, labels, scale, others = (x.view(-1, 1)[:count] if x.shape else x for x in pairs(count))
    return sums, labels, scale, others, (torch.rand(count, 1) < 0.5).float(), torch.tensor(mean)


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("mean", [-0.4, 0.0, 2.5])
@pytest.mark.parametrize("count", [1, 33, 700])
def test_the_loss_of_kto_and_its_gradient(count: int, mean: float, skew: int) -> None:
    given = answers(count, mean)
    exact = [x.double() for x in given]
    found = run("kto_loss", values(*given), KTO_SHAPES, attrs=WEIGHTS, skew=skew)
    for ours, theirs in zip(found, reference.kto_loss(*exact, **WEIGHTS), strict=True):
        assert_close(ours, theirs, torch.float32, 64, largest(exact, given[2]) + 5 * given[2] * count)
    d_loss = torch.randn(())
    (d_sums,) = run("kto_loss_bwd", values(d_loss, *given), [(count, 1)], attrs=WEIGHTS, skew=skew)
    assert_close(d_sums, reference.kto_loss_bwd(d_loss.double(), *exact, **WEIGHTS), torch.float32, 64)


def test_a_mean_that_is_nan_is_seen() -> None:
    loss, *_ = run("kto_loss", values(*answers(9, float("nan"))), KTO_SHAPES, attrs=WEIGHTS)
    assert loss.isnan()
