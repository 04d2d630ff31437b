"""Checks of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surogate_core.api import LossDef

from ..bench import Bench, Steps, based, shown, with_groups
from ..check import NotApplicable, proves, variants
from .training import OPTIONS, check_falls, check_recomputes, check_resumes, check_skips

CLOSE = 1e-4
"""Relative error of sums that are added in another order."""


def _runs(definition: LossDef, bench: Bench) -> list[dict[str, Any]]:
    base = {"loss": definition.name, **based(bench, definition)}
    return [{**base, **keys} for keys in variants(bench, definition, [{}])]


def _on_text(definition: LossDef, bench: Bench) -> list[dict[str, Any]]:
    """Return the runs that train on data that fits the loss."""
    runs = _runs(definition, bench)
    asks = definition.group_size > 1 or definition.columns(definition.options())
    if asks and not all("datasets" in keys for keys in runs):
        raise NotApplicable("plain text does not fit it: give examples of its keys with datasets")
    return runs


def _metrics(steps: Steps, *parts: slice) -> list[float]:
    """Return the sums of all metrics over parts of the groups, or documents, of a batch."""
    found = [steps.worker.evaluate(with_groups(steps.batch, steps.plan.inputs, part)) for part in parts]
    return [sum(values) for values in zip(*found, strict=True)]


def _check_close(steps: Steps, ours: Sequence[float], expected: Sequence[float], when: str) -> None:
    pairs = zip(steps.assembly.reported, ours, expected, strict=True)
    wrong = [f"{f.name} ({a:.6g}, expected {b:.6g})" for f, a, b in pairs if not abs(a - b) <= CLOSE * max(1, abs(b))]
    assert not wrong, f"{shown(wrong)} {when}"


@proves("loss", remedy="Check the sign of the terms. " + OPTIONS.format("loss NAME"))
def it_trains_and_the_loss_falls(definition: LossDef, bench: Bench) -> None:
    for keys in _on_text(definition, bench):
        check_falls(bench, keys)


@proves("loss", remedy="Sum over the units of a micro-batch and multiply by loss_scale or group_scale, once.")
def metrics_of_a_batch_are_the_sums_over_its_parts(definition: LossDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        steps = bench.steps(**keys)
        whole, parts = _metrics(steps, slice(None)), _metrics(steps, slice(0, 1), slice(1, None))
        _check_close(steps, parts, whole, "of two parts of a batch are not those of the batch")


@proves("loss", remedy="Multiply each figure by the scale of its unit: loss_scale per token, group_scale per group.")
def metrics_are_multiples_of_the_scale_of_their_unit(definition: LossDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        steps = bench.steps(**keys)
        found = []
        for token, group in ((1.0, 1.0), (0.5, 0.25)):
            steps.worker.micro_step(steps.batch, first=True, last=True, index=1, loss_scale=token, group_scale=group)
            found.append([float(steps.view(figure.step)) for figure in steps.assembly.reported])
        factors = [{"token": 0.5, "group": 0.25}[figure.per] for figure in steps.assembly.reported]
        expected = [value * factor for value, factor in zip(found[0], factors, strict=True)]
        _check_close(steps, found[1], expected, "with scales of 0.5 and 0.25")


@proves("loss", remedy="Let groups without documents, and tokens without a label, add nothing.")
def a_batch_without_labels_adds_nothing(definition: LossDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        steps = bench.steps(**keys)
        steps.worker.micro_step(
            with_groups(steps.batch, steps.plan.inputs, slice(0, 0)), first=True, last=True, loss_scale=1.0, index=1
        )
        wrong = [f.name for f in steps.assembly.reported if bool(steps.view(f.step).any())]
        wrong += [name for name, gradient in steps.gradients().items() if bool(gradient.any())]
        assert not wrong, f"{shown(wrong)} of a batch without a label is not 0"


@proves("loss", remedy="Let ops of the loss depend on their inputs alone.")
def recomputation_gives_the_same_bits(definition: LossDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_recomputes(bench, keys, each=False)


@proves("loss", remedy="Write no states.")
def a_step_that_is_skipped_changes_nothing(definition: LossDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_skips(bench.steps(**keys))


@proves("loss", remedy="Keep nothing between steps.")
def a_resumed_run_has_the_bits_of_an_uninterrupted_one(definition: LossDef, bench: Bench) -> None:
    for keys in _on_text(definition, bench):
        check_resumes(bench, keys)


@proves("loss", remedy="Let every trained param reach a term, with a gradient that is finite.")
def gradients_are_finite(definition: LossDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        steps = bench.steps(**keys)
        steps.micro_step()
        wrong = [name for name, gradient in steps.gradients().items() if not math.isfinite(float(gradient.sum()))]
        assert not wrong, f"the gradient of {shown(wrong)} is not finite"
