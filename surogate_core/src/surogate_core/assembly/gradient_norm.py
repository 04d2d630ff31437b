"""The norm of all gradients: on several ranks from sums of chunks, whose order does not depend on who has what."""

from __future__ import annotations

from collections.abc import Sequence

from ..program.builder import Builder
from ..program.shards import chunk_size, part_of
from ..program.value import Value

Held = Sequence[tuple[Value, Value]]
"""Gradients, and what a rank has of each: a part, or all of it."""


def emit_norm(b: Builder, held: Held, outs: Sequence[Value], *, ranks: int, max_norm: float) -> None:
    """Emit the norm of gradients and the factor that clips them, `outs`.

    Every rank sums the chunks of its parts and of the gradients that all ranks have, and receives the sums of others.
    """
    if ranks == 1:
        b.emit("global_norm", *(own for _, own in held), outs=outs, max_norm=max_norm)
        return
    divided = any(own.shard for _, own in held)
    of_rank = [[pair for pair in held if pair[1].owner in (None, rank)] for rank in range(ranks if divided else 1)]
    if any(own.owner is not None for _, own in held):
        sums = [_square_sums(b, pairs, ranks, rank) for rank, pairs in enumerate(of_rank) if pairs]
        shapes = ((sum(own.size for own in sums),),)
        (every,) = b.emit("broadcast", *sums, lane="comm", world_size=ranks, shapes=shapes)
    else:
        every = _square_sums(b, held)
        if divided:
            shapes = ((ranks * every.size,),)
            (every,) = b.emit("all_gather", every, lane="comm", world_size=ranks, shapes=shapes)
    b.emit("norm_of_sums", every, outs=outs, ranges=_ranges(held, of_rank), max_norm=max_norm)


def _square_sums(b: Builder, held: Held, ranks: int = 1, owner: int | None = None) -> Value:
    """Emit the sums of squares of the chunks of what a rank has; with an `owner`, of what this rank has."""
    chunks = [chunk_size(whole.size) for whole, _ in held]
    count = sum(_chunks(own, whole) for whole, own in held)
    out = b.activation("square_sums", (count,), "fp64")
    if owner is not None:
        out = part_of(out, ranks, owner)
    b.emit("square_sums", *(own for _, own in held), outs=[out], chunks=tuple(chunks))
    return out


def _ranges(held: Held, of_rank: Sequence[Held]) -> tuple[tuple[int, int], ...]:
    """Return where the sums of all gradients are, in the order of `held`, in the sums of one rank after another.

    Sums of padding are left out, and so are those that an earlier rank has too.
    """
    found: dict[Value, list[tuple[int, int]]] = {whole: [] for whole, _ in held}
    at = 0
    for pairs in of_rank:
        for whole, own in pairs:
            missing = _chunks(whole, whole) - sum(count for _, count in found[whole])
            if missing:
                found[whole].append((at, min(_chunks(own, whole), missing)))
            at += _chunks(own, whole)
    return tuple(one for ranges in found.values() for one in ranges)


def _chunks(own: Value, whole: Value) -> int:
    return -(-own.size // chunk_size(whole.size))
