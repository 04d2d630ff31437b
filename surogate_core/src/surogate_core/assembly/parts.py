"""The parts of params, gradients, masters and optimizer states that a rank holds (ZeRO)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..api import ParamInfo
from ..errors import ProgramError
from ..program.builder import Builder
from ..program.shards import SMALLEST_CHUNK, Sharding, is_divisible, part_inside
from ..program.value import Shard, Value
from .inputs import PlanInputs
from .transfers import gather


def divided(info: ParamInfo, inputs: PlanInputs, b: Builder) -> ParamInfo:
    """Return a trained param with this rank's part of it, if ranks divide its states.

    They divide matrices of the model. Vectors and the params of adapters are few bytes.
    """
    sharding, granularity = inputs.sharding, inputs.optimizer.granularity
    if not sharding.states or not info.stored or not is_divisible(info.param.shape, sharding.parts):
        return info
    together = granularity(info) if granularity else 0
    if not together or SMALLEST_CHUNK % together:
        return info
    assert info.grad is not None
    parts = sharding.parts
    sums = b.part(info.grad, parts) if sharding.gradients else part_inside(info.grad, parts)
    return replace(info, part=part_inside(info.param, parts), grad_part=sums)


def gather_updated(params: Iterable[ParamInfo], sharding: Sharding, b: Builder) -> None:
    """Emit what brings params of which ranks have written parts together, unless ranks hold no more than these."""
    if not sharding.weights:
        gather(b, [(p.part, p.param) for p in params if p.part is not None], sharding.parts)


def gradient_parts(params: Mapping[Value, ParamInfo]) -> dict[Value, Value]:
    """Return {gradient: this rank's part}."""
    return {p.grad: p.grad_part for p in params.values() if p.grad and p.grad_part}


def with_master(info: ParamInfo, dtype: str, b: Builder) -> ParamInfo:
    """Return a trained param with its master in `dtype`: the param itself, or a state that is declared here."""
    held = info.part or info.param
    if held.dtype in (dtype, "fp64"):
        return replace(info, master=held)
    return replace(info, master=b.state(f"master.{info.param.name}", held.shape, dtype, None, shard=held.shard))


def as_parts(states: Sequence[Value], wholes: Sequence[Value], parts: int) -> dict[Value, Value]:
    """Return the states that an optimizer declared for parts of params as parts of those that one rank would hold.

    `wholes` is what it declares for whole params, in the same order. Raises ProgramError if a state is no part.
    """
    if len(states) != len(wholes):
        raise ProgramError(f"declares {len(states)} states for parts of params, and {len(wholes)} for whole ones")
    found = {}
    for state, whole in zip(states, wholes, strict=True):
        if state.shape == whole.shape:
            continue
        if len(state.shape) != 1 or state.size * parts < whole.size or state.dtype != whole.dtype:
            raise ProgramError(
                f"declares {state!r} for a part of a param, which is no part of the {whole!r} of the whole: a state "
                "must have an element for each one, or block, of the param"
            )
        found[state] = replace(state, name=whole.name, shard=Shard(whole.shape, parts))
    return found
