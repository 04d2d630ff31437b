"""The learning rate of every step: linear, cosine, wsd or constant, with warmup and cooldown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from surogate_core.errors import ConfigError, ProgramError

Kind = Literal["linear", "cosine", "wsd", "constant"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step 1 .. total_steps. Made by `build`.

    With W = warmup_steps, N = total_steps, C = cooldown_steps, and "no warmup" meaning W = 1:

    - warmup: `base * step / W` up to step W. Step 1 is never 0, and the peak `base` is always reached, at step W.
    - linear, cosine: from `base` at step W to `final` at step N.
    - wsd: `base` until step N - C, then `base + (final - base) * sqrt(k / C)` at the k-th of the last C steps.
    - constant: `base` to the end; `final_lr_fraction` matters only with a cooldown.
    - cooldown (all but wsd, where it is the decay): a straight line over the last C steps, from the rate of the
      schedule at step N - C to `final` at step N. There is no jump: neither down to `final` when the cooldown
      begins, which would train its steps at 0 by default, nor back up to `base` after a decay. `linear` is on that
      line already and does not change.

    Step s equals index s of `transformers.get_{linear,cosine}_schedule_with_warmup`, whose first step has index 0
    and rate 0 when there is a warmup.
    """

    kind: Kind
    base_lr: float
    final_lr: float
    total_steps: int
    warmup_steps: int
    cooldown_steps: int
    warmup_is_share: bool = False

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
    ) -> Schedule:
        """Compute the lengths of the phases from the config's keys.

        `warmup_steps` > 0 overrides `warmup_ratio`, a fraction of total_steps, rounded up. The decay of wsd is
        `cooldown_steps` when > 0, else `wsd_decay_steps_fraction` of total_steps, rounded, which is 0 in a run of a
        few steps. The keys have the ranges of `TrainConfig`. Raises ConfigError for phases that do not fit into
        total_steps.
        """
        if total_steps < 1:
            raise ConfigError(f"schedule: the run has {total_steps} steps. Give it more data, epochs or max_steps.")

        warmup, warmup_from = warmup_steps, f"warmup_steps: {warmup_steps}"
        if warmup_steps == 0:
            # Rounded before the ceiling: 0.07 * 100 is 7.000000000000001 and stands for 7.
            warmup, warmup_from = math.ceil(round(warmup_ratio * total_steps, 6)), f"warmup_ratio: {warmup_ratio}"
        cooldown, cooldown_from = cooldown_steps, f"cooldown_steps: {cooldown_steps}"
        if kind == "wsd" and cooldown_steps == 0:
            cooldown = round(wsd_decay_steps_fraction * total_steps)
            cooldown_from = f"wsd_decay_steps_fraction: {wsd_decay_steps_fraction}"
        _check_fit(total_steps, warmup, warmup_from, cooldown, cooldown_from)
        return cls(
            kind=kind,
            base_lr=base_lr,
            final_lr=base_lr * final_lr_fraction,
            total_steps=total_steps,
            warmup_steps=warmup,
            cooldown_steps=cooldown,
            warmup_is_share=not warmup_steps and warmup > 0,
        )

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`. Raises ProgramError unless it is in 1 .. total_steps."""
        if not 1 <= step <= self.total_steps:
            raise ProgramError(f"schedule: lr asked for step {step}, but the run has steps 1 to {self.total_steps}")
        if step <= self.warmup_steps:
            return self.base_lr * step / self.warmup_steps
        cooldown_start = self.total_steps - self.cooldown_steps
        if step <= cooldown_start:
            return self._before_cooldown(step)
        done = (step - cooldown_start) / self.cooldown_steps
        if self.kind == "wsd":
            done = math.sqrt(done)
        return _between(self._before_cooldown(cooldown_start), self.final_lr, done)

    def extends(self, total_steps: int) -> bool:
        """Return whether a run of `total_steps` has the same rate at each of its steps and is shorter.

        Only if the rate depends on no length: constant, without a cooldown, with the warmup as a number of steps.
        """
        fixed = self.kind == "constant" and not self.cooldown_steps and not self.warmup_is_share
        return fixed and self.warmup_steps <= total_steps < self.total_steps

    def _before_cooldown(self, step: int) -> float:
        """Return the rate without a cooldown at `step` >= warmup_steps (0 when the cooldown is the whole run)."""
        if self.kind in ("wsd", "constant"):
            return self.base_lr
        peak_step = max(self.warmup_steps, 1)
        if step <= peak_step:
            return self.base_lr
        done = (step - peak_step) / (self.total_steps - peak_step)
        if self.kind == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return _between(self.base_lr, self.final_lr, done)


def _between(start: float, end: float, done: float) -> float:
    """Interpolate linearly: exactly `start` at `done` = 0 and exactly `end` at 1."""
    return start * (1 - done) + end * done


def _check_fit(total: int, warmup: int, warmup_from: str, cooldown: int, cooldown_from: str) -> None:
    if warmup + cooldown <= total:
        return
    phases = [f"{warmup} steps of warmup ({warmup_from})"] if warmup else []
    phases += [f"{cooldown} of cooldown ({cooldown_from})"] if cooldown else []
    raise ConfigError(
        f"schedule: {' and '.join(phases)} do not fit: {warmup + cooldown} steps, but the run has {total}. "
        "Shorten them or train for more steps."
    )
