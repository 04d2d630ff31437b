"""Moves activations of blocks to the host and back, ahead of the ops that need the memory or the values.

    forward   ... block k writes its residual | copy it to the host ... block k + 2 begins | wait for that copy ...
    backward  ... block k + 2 is read first | copy that of block k back ... block k reads it ...

So at most three blocks have a residual on the device, and a copy has two blocks of time. The last two blocks keep
theirs. With many tokens attention takes longer than a copy, so that one block of time is enough and one residual less
is on the device. What enters the first block moves as a residual does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from surogate_core.api import Builder, ConfigError, OffloadContext, Op, Program, Programs, Value

AHEAD = 2
"""Blocks between a copy and the op that needs its result."""

MANY_TOKENS = 16_384
"""With more tokens a copy has one block of time. A block of 8 billion parameters takes 0.6 us a token and its copy 0.2,
at any number of tokens; what attention adds grows with the length of a row."""


@dataclass(frozen=True)
class Moved:
    """Activations that a strategy moves.

    key     of the user's file, for messages
    title   for messages
    is_one  (an activation that a forward op writes, the ops that read it) -> whether it is one of them
    """

    key: str
    title: str
    is_one: Callable[[Value, Sequence[Op]], bool]


RESIDUAL = Moved(
    "offload_residual",
    "the residual stream",
    lambda value, reading: (
        value.label in ("residual", "residual_mid") if value.block >= 0 else {op.block for op in reading} == {0}
    ),
)

ATTENTION_LABELS = frozenset({"attention", "lse"})
ATTENTION = Moved(
    "offload_attention",
    "the outputs of attention",
    lambda value, reading: value.label in ATTENTION_LABELS and value.block >= 0,
)


@dataclass(frozen=True)
class _Use:
    """Indices of the ops that write a value, and that read it last in the forward and first in the backward pass."""

    written: int
    forward: int
    backward: int


def schedule(programs: Programs, context: OffloadContext, moved: Moved) -> Programs:
    """Return the programs whose micro-steps keep activations in host memory.

    Raises ConfigError for a model of so few blocks that nothing is moved.
    """
    uses = _uses(programs.micro, moved)
    blocks = {value.block for value in uses if value.block >= 0}
    ahead = _ahead(uses)
    if len(blocks) <= ahead:
        raise ConfigError(
            f"{moved.key}: true: nothing to move, because the backward pass reads {moved.title} of "
            f"{len(blocks)} blocks, and that of the last {ahead} stays on the device. Remove the key."
        )
    return programs.with_micro_steps(lambda program: offloaded(program, context.builder, moved))


def offloaded(program: Program, b: Builder, moving: Moved) -> Program:
    """Return `program` with moves of the values of `moving` that its backward pass reads."""
    uses = _uses(program, moving)
    ahead = _ahead(uses)
    blocks = sorted({value.block for value in uses})
    moved = {value: use for value, use in uses.items() if value.block in blocks[:-ahead]}
    after = {block: blocks[i + ahead] for i, block in enumerate(blocks[:-ahead])}  # the block that is so far ahead
    begins = {block: min(use.written for value, use in uses.items() if value.block == block) for block in blocks}
    returns = {block: min(use.backward for value, use in uses.items() if value.block == block) for block in blocks}

    before: dict[int, list[Op]] = {}
    back: dict[Value, Value] = {}
    for value, use in moved.items():
        with b.block(value.block):
            host = b.activation(value.label, value.shape, value.dtype, place="host")
            back[value] = b.activation(value.label, value.shape, value.dtype)
        later = after[value.block]
        with b.record("forward", value.block) as out:
            b.emit("move", value, outs=[host], lane="to_host")
        with b.record("forward", value.block) as waits:
            b.emit("wait", host)
        with b.record("backward", value.block) as into:
            b.emit("move", host, outs=[back[value]], lane="to_device")
        before.setdefault(use.written + 1, []).extend(out)
        before.setdefault(max(begins[later], use.forward) + 1, []).extend(waits)
        before.setdefault(min(returns[later], use.backward), []).extend(into)
    return replace(program, ops=tuple(_with(program.ops, before, back)))


def _ahead(uses: Collection[Value]) -> int:
    """Return how many of the blocks that have values to move lie between a copy and the op that needs its result.

    Where only every second block has (`recompute_pairs`), one of them has the time of two blocks.
    """
    blocks = sorted({value.block for value in uses if value.block >= 0})
    apart = min((after - block for block, after in pairwise(blocks)), default=1)
    return 1 if max((value.shape[0] for value in uses), default=0) > MANY_TOKENS else max(1, AHEAD // apart)


def _uses(program: Program, moved: Moved) -> dict[Value, _Use]:
    """Return the values to move that forward ops write and that others read."""
    position = {op: index for index, op in enumerate(program.ops)}
    readers = program.readers()
    found = {}
    for value, op in program.producers().items():
        reading = readers.get(value, ())
        if op.phase != "forward" or value in program.outputs or not moved.is_one(value, reading):
            continue
        reads = [(position[reader], reader.phase == "forward") for reader in reading]
        later = [index for index, is_forward in reads if not is_forward]
        if later:
            forward = max((index for index, is_forward in reads if is_forward), default=position[op])
            found[value] = _Use(position[op], forward, min(later))
    return found


def _with(ops: tuple[Op, ...], before: Mapping[int, list[Op]], back: Mapping[Value, Value]) -> Iterable[Op]:
    """Yield the ops with those of `before` in front of them. Ops after the forward pass read the values of `back`."""
    for index, op in enumerate(ops):
        yield from before.get(index, ())
        yield op if op.phase == "forward" else op.on(back)
