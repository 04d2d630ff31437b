"""The parts of params, gradients, masters and optimizer states that a rank holds (ZeRO)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..api import ParamInfo
from ..errors import ProgramError
from ..program.builder import Builder
from ..program.contents import alike, drawn
from ..program.shards import SMALLEST_CHUNK, Sharding, is_divisible, part_inside
from ..program.value import Shard, Value
from .inputs import PlanInputs
from .transfers import gather


def elements_together(info: ParamInfo, inputs: PlanInputs) -> int:
    """Return how many elements of a param its update needs together; 0: ranks do not divide its states.

    They divide matrices of the model that they train. Vectors and the params of adapters are few bytes.
    """
    optimizer, parts, size = inputs.optimizer, inputs.sharding.parts, info.param.size
    divisible = info.grad is not None and info.of_model and is_divisible(info.param.shape, parts)
    if stays_whole(info, inputs):
        return 0
    if not inputs.sharding.states or optimizer.granularity is None or not divisible:
        return 0
    together = optimizer.granularity(info)
    if together in (0, size) or (0 < together <= SMALLEST_CHUNK and SMALLEST_CHUNK % together == 0):
        return together
    what = f"{info.param!r} has the granularity {together}, expected 1 or another power of two up to {SMALLEST_CHUNK}"
    raise optimizer.failed("granularity", f"{what}, {size} (all elements) or 0")


def stays_whole(info: ParamInfo, inputs: PlanInputs) -> bool:
    """Return whether every rank holds all of a param although ranks divide weights.

    An adapter is saved as whole tensors, those of the model that it trains among them.
    """
    return inputs.sharding.weights and bool(inputs.adapters) and info.grad is not None


def assigned(params: Iterable[ParamInfo], work: Callable[[ParamInfo], int], parts: int) -> dict[Value, int]:
    """Return {param: the rank that owns it}, for params that are each updated as a whole.

    The one with the most `work` comes first, and goes to the rank that has the least so far. Of several, to the one
    with the fewest of the same block, because the gradients of a block are summed at a time.
    """
    loads, of_block = [(0, 0)] * parts, Counter[tuple[int, int]]()
    owners = {}
    sized = [(work(info), info.param.size, info.param) for info in params]
    for flops, size, param in sorted(sized, key=lambda one: one[:2], reverse=True):
        *_, rank = min((loads[rank], of_block[param.block, rank], rank) for rank in range(parts))
        owners[param] = rank
        of_block[param.block, rank] += 1
        loads[rank] = loads[rank][0] + flops, loads[rank][1] + size
    return owners


def divided(info: ParamInfo, sharding: Sharding, b: Builder, owner: int | None) -> ParamInfo:
    """Return a trained param whose states ranks divide with this rank's part of it; `owner`: if one has all."""
    assert info.grad is not None
    parts = sharding.parts
    sums = b.part(info.grad, parts, owner) if sharding.gradients else part_inside(info.grad, parts, owner)
    return replace(info, part=part_inside(info.param, parts, owner), grad_part=sums)


def gather_updated(params: Iterable[ParamInfo], sharding: Sharding, b: Builder) -> None:
    """Emit what brings params of which ranks have written parts together, but those of which they hold no more."""
    pairs = ((p.part, p.param) for p in params if p.part is not None)
    gather(b, [(part, param) for part, param in pairs if not sharding.divides(param)], sharding.parts)


def gradient_parts(params: Mapping[Value, ParamInfo]) -> dict[Value, Value]:
    return {p.grad: p.grad_part for p in params.values() if p.grad and p.grad_part}


def with_master(info: ParamInfo, dtype: str, b: Builder) -> ParamInfo:
    """Return a trained param with its master in `dtype`: the param itself, or a state that is declared here."""
    own = info.part or info.param
    if own.dtype in (dtype, "fp64"):
        return replace(info, master=own)
    return replace(info, master=b.state(f"master.{info.param.name}", own.shape, dtype, None, shard=own.shard))


def owned(values: Iterable[Value], owner: int, parts: int) -> dict[Value, Value]:
    """Return the states and activations of an optimizer for params of an owner as its own."""
    return {value: replace(value, shard=Shard(value.shape, parts, owner)) for value in values}


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
        if state.init is not None and not alike(state.init):
            why = "which every rank would draw for itself" if drawn(state.init) else "which are those of other rows"
            raise ProgramError(
                f"declares {state!r} for a part of a param with {state.init.kind} contents, {why}: write the state in "
                "the first step, or return 0 from `granularity`"
            )
        found[state] = replace(state, name=whole.name, shard=Shard(whole.shape, parts))
    return found
