"""The learning rate of every step: warmup, decay and cooldown. `decays.py` has how far each kind has decayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surogate_core.errors import ConfigError, ProgramError

from ..config.schedule_kinds import (
    CosineWarmupWithMinLr,
    Kind,
    Polynomial,
    ReduceLrOnPlateau,
    Settings,
    WarmupStableDecay,
    settings_of,
)
from .decays import decayed, plateau_rate, stable_steps, warmed

_WITHOUT_A_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Kinds whose rate at a step does not depend on how many steps the run has."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step 1 .. total_steps. Made by `build`.

    With W = warmup_steps, N = total_steps, C = cooldown_steps, and "no warmup" meaning W = 1:

    - warmup: `base * step / W` up to step W. Step 1 is never 0, and the peak `base` is always reached, at step W.
    - linear, cosine and its kinds, polynomial: from `base` at step W to `final` at step N.
    - wsd: `base` until step N - C, then `base + (final - base) * sqrt(k / C)` at the k-th of the last C steps.
    - constant, constant_with_warmup: `base` to the end; `final_lr_fraction` matters only with a cooldown.
    - inverse_sqrt: `base / sqrt(1 + (step - W) / timescale)`; `final_lr_fraction` as with constant.
    - warmup_stable_decay: transformers' own phases, whose lengths are settings.
    - reduce_lr_on_plateau: `base`, multiplied by `factor` when evaluations stop improving, as torch's scheduler does.
    - cooldown (all but wsd, where it is the decay): a straight line over the last C steps, from the rate of the
      schedule at step N - C to `final` at step N. There is no jump: neither down to `final` when the cooldown
      begins, which would train its steps at 0 by default, nor back up to `base` after a decay. `linear` is on that
      line already and does not change.

    Step s equals index s of the schedule that `transformers.get_scheduler` makes, whose first step has index 0 and rate
    0 when there is a warmup. cosine_warmup_with_min_lr begins above 0 there, so its step s equals index s - 1.
    """

    kind: Kind
    base_lr: float
    final_lr: float
    total_steps: int
    warmup_steps: int
    cooldown_steps: int
    warmup_is_share: bool = False
    settings: Settings = field(default_factory=Settings)

    @classmethod
    def build(
        cls,
        kind: Kind,
        base_lr: float,
        total_steps: int,
        warmup_steps: int = 0,
        warmup_ratio: float = 0.0,
        cooldown_steps: int = 0,
        final_lr_fraction: float = 0.0,
        wsd_decay_steps_fraction: float = 0.1,
        settings: Mapping[str, Any] | None = None,
    ) -> Schedule:
        """Compute the lengths of the phases from the config's keys.

        `warmup_steps` > 0 overrides `warmup_ratio`, a fraction of total_steps, rounded up. The decay of wsd is
        `cooldown_steps` when > 0, else `wsd_decay_steps_fraction` of total_steps, rounded, which is 0 in a run of a
        few steps. The keys have the ranges of `TrainConfig`, and `settings` are its `lr_scheduler_kwargs`. Raises
        ConfigError for phases that do not fit into total_steps.
        """
        if total_steps < 1:
            raise ConfigError(f"schedule: the run has {total_steps} steps. Give it more data, epochs or max_steps.")
        chosen, problems = settings_of(kind, settings or {})
        if chosen is None:
            raise ConfigError("\n".join(problem.line("schedule") for problem in problems))

        warmup, warmup_from = warmup_steps, f"warmup_steps: {warmup_steps}"
        if warmup_steps == 0:
            # Rounded before the ceiling: 0.07 * 100 is 7.000000000000001 and stands for 7.
            warmup, warmup_from = math.ceil(round(warmup_ratio * total_steps, 6)), f"warmup_ratio: {warmup_ratio}"
        cooldown, cooldown_from = cooldown_steps, f"cooldown_steps: {cooldown_steps}"
        if kind == "wsd" and cooldown_steps == 0:
            cooldown = round(wsd_decay_steps_fraction * total_steps)
            cooldown_from = f"wsd_decay_steps_fraction: {wsd_decay_steps_fraction}"
        phases = [(warmup, "warmup", warmup_from), (cooldown, "cooldown", cooldown_from)]
        if isinstance(chosen, WarmupStableDecay):
            stable = chosen.num_stable_steps
            phases += [(stable, "stable rate", f"num_stable_steps: {stable}")] if stable else []
            phases += [(chosen.num_decay_steps, "decay", f"num_decay_steps: {chosen.num_decay_steps}")]
        _check_fit(total_steps, phases)
        return cls(
            kind=kind,
            base_lr=base_lr,
            final_lr=_end(chosen, base_lr, final_lr_fraction),
            total_steps=total_steps,
            warmup_steps=warmup,
            cooldown_steps=cooldown,
            warmup_is_share=not warmup_steps and warmup > 0,
            settings=chosen,
        )

    def lr(self, step: int, losses: Sequence[float] = ()) -> float:
        """Return the learning rate of optimizer step `step`. Raises ProgramError unless it is in 1 .. total_steps.

        losses: of the evaluations before the step, in order, which reduce_lr_on_plateau reads.
        """
        if not 1 <= step <= self.total_steps:
            raise ProgramError(f"schedule: lr asked for step {step}, but the run has steps 1 to {self.total_steps}")
        if step <= self.warmup_steps:
            return self._warmup(step)
        cooldown_start = self.total_steps - self.cooldown_steps
        if step <= cooldown_start:
            return self._before_cooldown(step, losses)
        done = (step - cooldown_start) / self.cooldown_steps
        if self.kind == "wsd":
            done = math.sqrt(done)
        return _between(self._before_cooldown(cooldown_start, losses), self.final_lr, done)

    def extends(self, total_steps: int) -> bool:
        """Return whether a run of `total_steps` has the same rate at each of its steps and is shorter.

        Only if the rate depends on no length: constant or inverse_sqrt, without a cooldown, with the warmup as a number
        of steps.
        """
        fixed = self.kind in _WITHOUT_A_LENGTH and not self.cooldown_steps and not self.warmup_is_share
        return fixed and self.warmup_steps <= total_steps < self.total_steps

    def _warmup(self, step: int) -> float:
        if isinstance(self.settings, WarmupStableDecay):
            return _between(self.final_lr, self.base_lr, warmed(self.settings.warmup_type, step / self.warmup_steps))
        least = self.settings.warmup_lr_rate if isinstance(self.settings, CosineWarmupWithMinLr) else None
        if least is not None:
            return _between(least * self.base_lr, self.base_lr, (step - 1) / max(1, self.warmup_steps - 1))
        return self.base_lr * step / self.warmup_steps

    def _before_cooldown(self, step: int, losses: Sequence[float]) -> float:
        """Return the rate without a cooldown at `step` >= warmup_steps (0 when the cooldown is the whole run)."""
        if isinstance(self.settings, ReduceLrOnPlateau):
            return plateau_rate(self.settings, self.base_lr, losses)
        if self.kind in ("wsd", "constant", "constant_with_warmup"):
            return self.base_lr
        peak_step = max(self.warmup_steps, 1)
        if isinstance(self.settings, CosineWarmupWithMinLr):
            peak_step = self.warmup_steps
        elif isinstance(self.settings, WarmupStableDecay):
            peak_step = stable_steps(self.settings, self.warmup_steps, self.total_steps) + self.warmup_steps
        if step <= peak_step:
            return self.base_lr
        if self.kind == "inverse_sqrt":
            timescale = getattr(self.settings, "timescale", None) or self.warmup_steps or 10_000
            return self.base_lr / math.sqrt((step - peak_step + timescale) / timescale)
        decay_steps = self.total_steps - peak_step
        if isinstance(self.settings, WarmupStableDecay):
            decay_steps = self.settings.num_decay_steps
        share = decayed(self.settings, min(1.0, (step - peak_step) / decay_steps) if decay_steps else 1.0)
        return _between(self.base_lr, self.final_lr, share)


def _end(settings: Settings, base: float, fraction: float) -> float:
    """Return the rate at which a schedule ends. Settings that name it come before `final_lr_fraction`."""
    if isinstance(settings, Polynomial):
        return settings.lr_end
    if isinstance(settings, WarmupStableDecay):
        return base * settings.min_lr_ratio
    rate = getattr(settings, "min_lr_rate", None)
    least = getattr(settings, "min_lr", None) if not isinstance(settings, ReduceLrOnPlateau) else None
    if least is not None:
        return float(least)
    return base * (fraction if rate is None else rate)


def _between(start: float, end: float, done: float) -> float:
    """Interpolate linearly: exactly `start` at `done` = 0 and exactly `end` at 1."""
    return start * (1 - done) + end * done


def _check_fit(total: int, phases: Sequence[tuple[int, str, str]]) -> None:
    """Raise ConfigError if the phases, each with its steps, its name and its origin, take more than `total` steps."""
    taken = sum(steps for steps, _, _ in phases)
    if taken <= total:
        return
    first, *others = [(steps, name, origin) for steps, name, origin in phases if steps]
    texts = [f"{first[0]} steps of {first[1]} ({first[2]})"] if first[1] == "warmup" else []
    texts += [f"{steps} of {name} ({origin})" for steps, name, origin in ([] if texts else [first]) + others]
    raise ConfigError(
        f"schedule: {' and '.join(texts)} do not fit: {taken} steps, but the run has {total}. "
        "Shorten them or train for more steps."
    )
