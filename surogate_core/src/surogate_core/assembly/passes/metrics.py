"""Reported values get states, which outlive the programs."""

from __future__ import annotations

from dataclasses import replace

from ...api import Init
from ...program.value import Value
from ..assembly import Reported
from ..draft import Draft

_ZERO = Init(kind="zeros")


def declare_metrics(draft: Draft) -> Draft:
    """Declare the states of the loss and of other metrics, after a step and after an evaluation, and of the norm.

    Metrics may share a value, which has its states once.
    """
    b, totals, evaluated = draft.builder, dict[Value, Value](), dict[Value, Value]()
    reported = []
    for metric in draft.metrics:
        value = metric.value
        if value not in totals:
            totals[value] = b.state(f"step_{metric.name}", value.shape, value.dtype, _ZERO, collects="sum")
            evaluated[value] = b.state(f"eval_{metric.name}", value.shape, value.dtype, _ZERO)
        states = totals[value], evaluated[value]
        reported.append(Reported(metric.name, metric.per, *states, metric.of, metric.doubt, metric.headline))
    kept = () if draft.cached_reference is None else (draft.cached_reference,)
    cached = tuple(b.state("cached_reference", v.shape, v.dtype, _ZERO) for v in kept)
    evaluated |= zip(kept, cached, strict=True)
    norm = b.state("grad_norm", (), "fp32", _ZERO)
    return replace(draft, totals=totals, evaluated=evaluated, reported=tuple(reported), cached=cached, grad_norm=norm)
