"""Checks of losses."""

from __future__ import annotations

import math
from typing import Any

from surogate_core.api import LossDef

from ..bench import Bench, based, shown, with_groups
from ..check import NotApplicable, proves, variants
from .training import (
    OPTIONS,
    SCALES,
    SUMS,
    check_falls,
    check_recomputes,
    check_resumes,
    check_scales,
    check_skips,
    check_sums,
)


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


@proves("loss", remedy="Check the sign of the terms. " + OPTIONS.format("loss NAME"))
def it_trains_and_the_loss_falls(definition: LossDef, bench: Bench) -> None:
    for keys in _on_text(definition, bench):
        check_falls(bench, keys)


@proves("loss", remedy=SUMS)
def metrics_of_a_batch_are_the_sums_over_its_parts(definition: LossDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_sums(bench.steps(**keys))


@proves("loss", remedy=SCALES)
def metrics_are_multiples_of_the_scale_of_their_unit(definition: LossDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_scales(bench.steps(**keys))


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
