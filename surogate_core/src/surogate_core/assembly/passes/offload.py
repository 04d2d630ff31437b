"""Offload strategies move values to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...api import OffloadContext
from ...errors import ProgramError
from ...origin import blaming
from ...program.value import Value
from ..draft import Draft


def apply_offloads(draft: Draft) -> Draft:
    """Apply one strategy after another: what it holds on the host (`stream_values` places it), and its schedule."""
    on_host: dict[Value, None] = {}
    for strategy, options in draft.inputs.offload:
        context = OffloadContext(
            builder=draft.builder,
            target=draft.inputs.target,
            params=draft.params,
            optimizer_states=draft.states,
            options=options,
        )
        if strategy.on_host is not None:
            values = tuple(strategy.on_host(draft.family, context))
            with blaming(strategy.origin, "on_host"):
                _check_on_host(values)
            on_host |= dict.fromkeys(values)
        if strategy.schedule is not None:
            before, after = draft.programs, strategy.schedule(draft.family, context)
            for program in after.all():
                if program is not before.get(program.name):
                    draft.verified(before.get(program.name), program, (strategy, "schedule"))
            draft = replace(draft.having(*after.all()), clip_coef=after.clip_coef, numerics=after.numerics)
    return replace(draft, on_host=tuple(on_host))


def _check_on_host(values: Sequence[object]) -> None:
    """Raise ProgramError unless these are values that the host can hold."""
    if not values:
        raise ProgramError("returned nothing; raise ConfigError if a run has nothing to hold")
    for value in values:
        if not isinstance(value, Value) or value.role not in ("param", "grad", "state") or value.collects:
            what = "a collecting state" if isinstance(value, Value) and value.collects else f"{value!r:.80}"
            raise ProgramError(f"returned {what}, expected params, gradients and states")
