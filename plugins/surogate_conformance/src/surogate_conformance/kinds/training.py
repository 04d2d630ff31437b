"""What holds for the training runs of definitions of every kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..bench import STEPS, Bench, Steps, differing, shown

Keys = Mapping[str, Any]
OPTIONS = 'Options that suit a tiny model go into an example: SUROGATE_EXAMPLES = {{"{}": [{{"learning_rate": 1}}]}}.'


def check_falls(bench: Bench, keys: Keys) -> None:
    """Assert that the loss of a run falls."""
    losses = bench.train(save_steps=STEPS // 2, **keys).losses
    last = losses[max(losses)]
    assert math.isfinite(last), f"the loss of step {max(losses)} is {last}{_with(keys)}"
    assert last < losses[1] - 0.01, (
        f"the loss is {losses[1]:.4f} in step 1 and {last:.4f} in step {max(losses)}{_with(keys)}"
    )


def check_resumes(bench: Bench, keys: Keys) -> None:
    """Assert that a run resumed from the middle has the bits of one that was not interrupted."""
    straight = bench.train(save_steps=STEPS // 2, **keys)
    saved = straight.folder / f"step_{STEPS // 2:08d}"
    resumed = bench.train(save_steps=STEPS // 2, resume_from_checkpoint=str(saved), **keys)
    for step, loss in resumed.losses.items():
        assert loss == straight.losses[step], (
            f"the loss of step {step} is {loss!r}, without an interruption {straight.losses[step]!r}"
        )
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


def check_recomputes(bench: Bench, keys: Keys) -> None:
    """Assert that every key of recomputation gives the same bits."""
    runs = {part: bench.steps(**{**keys, part: True} if part else keys) for part in ("", *_parts(keys))}
    for steps in runs.values():
        steps.step()
    plain = runs.pop("").bits("param", "state")
    for part, steps in runs.items():
        wrong = differing(plain, steps.bits("param", "state"))
        assert not wrong, f"with {part}: true other bits come out of {shown(wrong)}{_with(keys)}"


def _parts(keys: Keys) -> list[str]:
    names = ["swiglu", "rmsnorm", "ffn", "qkv", "att", "block", *(["lora"] if "adapter" in keys else [])]
    return [f"recompute_{name}" for name in names]


def _with(keys: Keys) -> str:
    text = ", ".join(f"{key}: {value}" for key, value in keys.items() if key not in ("model", "from_scratch"))
    return f" with {text}" if text else ""
