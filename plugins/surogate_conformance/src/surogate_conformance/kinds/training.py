"""Checks of training runs, for definitions of every kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..bench import STEPS, Bench, Steps, differing, shown, with_groups

Keys = Mapping[str, Any]
OPTIONS = 'Options that suit a tiny model go into an example: SUROGATE_EXAMPLES = {{"{}": [{{"learning_rate": 1}}]}}.'
SUMS = "Sum over the units of a micro-batch with a label and multiply by loss_scale or group_scale, once."
SCALES = "Multiply each metric by the scale of its unit: loss_scale per token, group_scale per group."
CLOSE = 1e-4
"""Relative error of sums that are added in another order."""


def check_falls(bench: Bench, keys: Keys) -> None:
    """Assert that the loss of a run falls."""
    losses = bench.train(save_steps=STEPS // 2, **keys).losses
    last = losses[max(losses)]
    assert math.isfinite(last), f"the loss of step {max(losses)} is {last}{_with(keys)}"
    assert last < losses[1] - 0.01, (
        f"the loss is {losses[1]:.4f} in step 1 and {last:.4f} in step {max(losses)}{_with(keys)}"
    )


def check_resumes(bench: Bench, keys: Keys, straight_keys: Keys | None = None) -> None:
    """Assert that a run resumed from the middle of one with `straight_keys`, by default its own, has its bits."""
    straight = bench.train(save_steps=STEPS // 2, **(keys if straight_keys is None else straight_keys))
    saved = straight.folder / f"step_{STEPS // 2:08d}"
    resumed = bench.train(save_steps=STEPS // 2, resume_from_checkpoint=str(saved), **keys)
    for step, loss in resumed.losses.items():
        expected = straight.losses[step]
        assert loss == expected, f"the loss of step {step} is {loss!r}, without an interruption {expected!r}"
    wrong = differing(straight.tensors(STEPS), resumed.tensors(STEPS))
    assert not wrong, f"{shown(wrong)} differ from those of an uninterrupted run{_with(keys)}"


def check_skips(steps: Steps) -> None:
    """Assert that steps whose gradients are not finite change no param and no state."""
    steps.step()
    before = steps.bits("param", "state")
    for scale in (math.nan, math.inf):
        steps.step(scale)
        wrong = differing(before, steps.bits("param", "state"))
        assert not wrong, f"a step with gradients of {scale} changes {shown(wrong)}"


def check_sums(steps: Steps) -> None:
    """Assert that the metrics of a batch are the sums of those of its parts: groups, or documents."""
    whole, one, other = (
        steps.worker.evaluate(with_groups(steps.batch, steps.plan.inputs, part))
        for part in (slice(None), slice(0, 1), slice(1, None))
    )
    parts = [a + b for a, b in zip(one, other, strict=True)]
    _check_close(steps, parts, whole, "of two parts of a batch are not those of the batch")


def check_scales(steps: Steps) -> None:
    """Assert that each metric is in proportion to the scale of its unit. `Metric.of` is of sums without a scale."""
    found = []
    for token, group in ((1.0, 1.0), (0.5, 0.25)):
        steps.worker.micro_step(steps.batch, first=True, last=True, index=1, loss_scale=token, group_scale=group)
        found.append([steps.view(metric.step).double().numpy() for metric in steps.assembly.reported])
    factors = {"token": 0.5, "group": 0.25}
    expected = [
        value * factors[metric.per] if metric.of is float else again
        for metric, value, again in zip(steps.assembly.reported, *found, strict=True)
    ]
    _check_close(steps, found[1], expected, "with scales of 0.5 and 0.25")


def _check_close(steps: Steps, ours: Sequence[Any], expected: Sequence[Any], when: str) -> None:
    """Assert that values are close, by the largest of each: of a `Metric.of`, what it is computed from is a table."""
    wrong = []
    for metric, a, b in zip(steps.assembly.reported, ours, expected, strict=True):
        errors = np.abs(np.subtract(a, b))
        if not np.max(errors) <= CLOSE * max(1, np.max(np.abs(b))):
            at = np.argmax(errors)
            wrong.append(f"{metric.name} ({np.ravel(a)[at]:.6g}, expected {np.ravel(b)[at]:.6g})")
    assert not wrong, f"{shown(wrong)} {when}"


def check_derived(steps: Steps) -> None:
    """Assert that the states which `derive` writes are in no checkpoint."""
    programs = (steps.assembly.only("derive"), *(staged.program for staged in steps.assembly.staging))
    written = {v.name for program in programs for op in program.ops for v in op.written if v.role == "state"}
    wrong = [v.name for v in steps.assembly.allocated if v.name in written and not v.derived]
    assert not wrong, f"derive writes {shown(wrong)}, which is not declared `derived`"


def check_recomputes(bench: Bench, keys: Keys, *, each: bool = True) -> None:
    """Assert that recomputation gives the same bits: by each of its keys, and of everything."""
    parts = ("swiglu", "rmsnorm", "ffn", "qkv", "att", "block", *(["lora"] if "adapter" in keys else []))
    changes: list[dict[str, Any]] = [{"recompute": "true"}, *({f"recompute_{part}": True} for part in parts if each)]
    runs = [bench.steps(**keys), *(bench.steps(**{**keys, **change}) for change in changes)]
    for steps in runs:
        steps.step()
    plain, *others = (steps.bits("param", "state") for steps in runs)
    for change, bits in zip(changes, others, strict=True):
        wrong = differing(plain, bits)
        assert not wrong, f"other bits come out of {shown(wrong)}{_with({**keys, **change})}"


def _with(keys: Keys) -> str:
    text = ", ".join(f"{key}: {value}" for key, value in keys.items() if key not in ("model", "from_scratch"))
    return f" with {text}" if text else ""
