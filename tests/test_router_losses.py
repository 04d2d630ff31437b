"""A loss of a model, beside that of the run: a made-up family balances its experts, with a weight from its options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import routed_family
import torch
import torch.nn.functional as F
from models import harness
from routed_family import CONFIG, EXPERTS, MODEL, RoutedOptions
from torch import Tensor

from surogate_core import Definitions, Trained, train_from
from surogate_core.api import ModelDef, PrecisionRequest, StepReport
from surogate_core.assembly.configured import configured

ROWS = [[[5, 9, 2, 7], [3, 3, 8]], [[1, 6, 2, 40, 2, 11], [17, 4]]]


@pytest.fixture(autouse=True)
def with_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = {definition.kind: definition for definition in routed_family.OPS}
    monkeypatch.setattr(harness, "OPS", {**harness.OPS, **ops})


def planned(monkeypatch: pytest.MonkeyPatch, weight: float) -> harness.PlannedModel:
    """Return the family in fp64 with random weights."""
    model = configured(MODEL, RoutedOptions(acme_balance_weight=weight))
    monkeypatch.setitem(harness.MODELS, "acme_routed", model)
    request = PrecisionRequest(model_dtype="fp32", param_grad_dtype="fp32")
    found = harness.PlannedModel({**CONFIG, "vocab_size": 61}, 1, 16, request=request, grad_accum_steps=2)
    draw = torch.Generator().manual_seed(0)
    for param in found.params.values():
        param.copy_(torch.randn(param.shape, generator=draw))
    return found


def of_torch(params: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """Return the gradients of the same model and losses by autograd, in fp64."""
    p = {name: tensor.double().requires_grad_() for name, tensor in params.items()}
    labels = sum(len(document) - 1 for row in ROWS for document in row)
    total = torch.zeros((), dtype=torch.float64)
    for row in ROWS:  # a micro-step each
        tokens = torch.tensor([token for document in row for token in document])
        targets = torch.tensor([t for document in row for t in (*document[1:], -100)])
        x = p["embedding"][tokens]
        logits = x @ p["router"].T
        hidden = x + x * (logits.softmax(-1) @ p["experts"])
        total = total + F.cross_entropy(hidden @ p["head"].T, targets, ignore_index=-100, reduction="sum") / labels
        rows = logits.softmax(-1)[targets >= 0]
        share = torch.stack([(rows.argmax(-1) == e).double().mean() for e in range(EXPERTS)])
        total = total + weight * EXPERTS * (share * rows.mean(0)).sum() * len(rows) / labels
    total.backward()
    return {name: tensor.grad for name, tensor in p.items() if tensor.grad is not None}


@pytest.mark.parametrize("weight", [0.01, 3.0])
def test_the_gradient_is_that_of_autograd_of_the_sum_of_both_losses(
    monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    ours = planned(monkeypatch, weight)
    labels = sum(len(document) - 1 for row in ROWS for document in row)
    for index, row in enumerate(ROWS):
        ours.micro_step([row], 1 / labels, first=index == 0)
    theirs = of_torch(dict(ours.params), weight)
    alone = of_torch(dict(ours.params), 0.0)
    assert harness.relative_error(theirs["router"], alone["router"]) > 1e-3  # the loss of the router matters
    for name, gradient in ours.gradients.items():
        name = name.removesuffix(".weight")
        assert harness.relative_error(gradient.double(), theirs[name]) < 2e-6, name


def trained(weight: float, model: ModelDef = MODEL) -> tuple[Trained, list[StepReport]]:
    definitions = Definitions(
        model=CONFIG,
        recipe="bf16",
        optimizer="adamw",
        given=[model, *routed_family.OPS],
        precision=PrecisionRequest(model_dtype="fp32"),
        options={"model": {"acme_balance_weight": weight}},
    )
    reports: list[StepReport] = []
    return train_from(definitions, batches(), learning_rate=0.01, report=reports.append), reports


def batches() -> Iterator[np.ndarray]:
    draw = np.random.default_rng(0)
    return (draw.integers(0, 61, (2, 2, 16)) for _ in range(6))


def same(one: Trained, other: Trained) -> list[bool]:
    return [np.array_equal(one.weights[name], other.weights[name]) for name in sorted(one.weights)]


def test_a_weight_of_zero_gives_the_bits_of_a_model_without_the_loss() -> None:
    def without(b, d, batch):  # type: ignore[no-untyped-def]
        return replace(MODEL.build(b, d, batch), losses=(), metrics=())

    none, _ = trained(3.0, replace(MODEL, build=without))
    assert all(same(trained(0.0)[0], none))
    assert not all(same(trained(3.0)[0], none))


def test_the_reported_loss_is_that_of_the_run_alone_and_a_metric_reports_the_other() -> None:
    (_, plain), (_, balanced) = trained(0.0), trained(3.0)
    assert plain[0].loss == balanced[0].loss and plain[-1].loss != balanced[-1].loss
    assert not plain[0].metrics
    assert all(report.metrics.keys() == {"balance"} for report in balanced)
    assert 3.0 < balanced[0].metrics["balance"] < 3.0 * EXPERTS  # the weight, times 1 if they are balanced
