"""The steps after which something is due: every N steps, or N times an epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from surogate_core.errors import ConfigError

from ..config.schema import TrainConfig
from ..reporting.text import counted


@dataclass(frozen=True)
class DueSteps(Sequence[int]):
    """The steps `ceil(number * epoch / times)` of `numbers`, in order, and then `last`.

    Each is computed when it is asked for: a run may have 10^12 evaluations, of which it reaches a few.
    """

    numbers: range
    epoch: int
    times: int
    last: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers) + len(self.last)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if at < len(self.numbers):
            return -(-self.numbers[at] * self.epoch // self.times)
        return self.last[at - len(self.numbers)]


@dataclass(frozen=True)
class Cadence:
    """The steps after which something is due: every `steps`, 0 for none, or `times` in each epoch of `epoch` steps.

    None of them is before the step `first`.
    """

    steps: int = 0
    times: int = 0
    epoch: int = 1
    first: int = 1

    def due(self, step: int) -> bool:
        """Return whether it is due after a step; the first step is 1. The last of an epoch is at its end."""
        if step < self.first:
            return False
        if self.times:
            return step * self.times // self.epoch > (step - 1) * self.times // self.epoch
        return bool(self.steps) and step % self.steps == 0

    def within(self, total: int) -> DueSteps:
        """Return the steps of a run of `total` steps, but the last, after which it is due."""
        times, epoch = (self.times, self.epoch) if self.times else (1, self.steps)
        if not epoch:
            return DueSteps(range(0), 1, 1)
        first = (self.first - 1) * times // epoch + 1
        return DueSteps(range(first, max(first, (total - 1) * times // epoch + 1)), epoch, times)


def evaluations_of(config: TrainConfig, total: int, epoch: int) -> Cadence:
    """Return when a run evaluates between its steps. Raises ConfigError as `cadence_of`."""
    delay = config.eval_delay * epoch if config.counts_epochs else config.eval_delay
    return replace(cadence_of(config, "eval", total, epoch), first=max(1, math.ceil(round(delay, 6))))


def cadence_of(config: TrainConfig, what: str, total: int, epoch: int) -> Cadence:
    """Return when a run of `total` steps, `epoch` of them in an epoch, does `what`: "eval" or "save".

    Raises ConfigError for more times in an epoch than it has steps.
    """
    strategy, times = getattr(config, f"{what}_strategy"), getattr(config, f"{what}s_per_epoch")
    if strategy in ("no", "best"):
        return Cadence()
    if strategy == "epoch":
        return Cadence(times=1, epoch=epoch)
    if times:
        if times > epoch:
            raise ConfigError(
                f"{what}s_per_epoch: is {times:,}, but an epoch of this data has {counted(epoch, 'step')}. "
                f"Use {epoch:,} or less, or {what}_steps."
            )
        return Cadence(times=times, epoch=epoch)
    return Cadence(steps_of(getattr(config, f"{what}_steps"), total))


def steps_of(given: int | float, total: int) -> int:
    """Return a number of steps that is given as one, or below 1 as a part of `total`, rounded up as in transformers."""
    return math.ceil(round(given * total, 6)) if 0 < given < 1 else int(given)
