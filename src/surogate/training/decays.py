"""Warmups and decays of schedules, as parts of their way, by the formulas of transformers and of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..config.schedule_kinds import CosineWithRestarts, Polynomial, ReduceLrOnPlateau, Settings, WarmupStableDecay


def warmed(shape: str, done: float) -> float:
    """Return which part of the way up `done` of the warmup, in 0 .. 1, has gone."""
    if shape == "cosine":
        return (1 - math.cos(math.pi * done)) / 2
    return 1 - math.sqrt(1 - done) if shape == "1-sqrt" else done


def decayed(settings: Settings, done: float) -> float:
    """Return which part of the way down to the final rate `done` of the decay, in 0 .. 1, has gone."""
    if isinstance(settings, Polynomial):
        return 1 - (1 - done) ** settings.power
    if isinstance(settings, CosineWithRestarts):
        return 1.0 if done >= 1 else (1 - math.cos(math.pi * (settings.num_cycles * done % 1.0))) / 2
    if isinstance(settings, WarmupStableDecay) and settings.decay_type != "cosine":
        return done if settings.decay_type == "linear" else math.sqrt(done)
    cycles = getattr(settings, "num_cycles", None)
    return done if cycles is None else (1 - math.cos(math.pi * (2.0 * cycles) * done)) / 2


def stable_steps(settings: WarmupStableDecay, warmup: int, total: int) -> int:
    """Return the steps at the peak: as given, else all that warmup and decay leave."""
    stable = settings.num_stable_steps
    return total - warmup - settings.num_decay_steps if stable is None else stable


def plateau_rate(settings: ReduceLrOnPlateau, base: float, losses: Sequence[float]) -> float:
    """Return the rate after evaluations with `losses`, in order, as torch's `ReduceLROnPlateau` has it.

    It is computed from all losses each time, so that a resumed run, which knows them, has the same rates.
    """
    rate, best, bad, cooling = base, math.inf, 0, 0
    for loss in losses:
        least = best * (1 - settings.threshold) if settings.threshold_mode == "rel" else best - settings.threshold
        if loss < least:
            best, bad = loss, 0
        else:
            bad += 1
        if cooling:
            cooling, bad = cooling - 1, 0
        if bad > settings.patience:
            lower = max(rate * settings.factor, settings.min_lr)
            rate = lower if rate - lower > settings.eps else rate
            bad, cooling = 0, settings.cooldown
    return rate
