"""Transfers of values to the device ahead of their use: from the memory of the host, or from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..program.builder import Builder
from ..program.shards import room
from ..program.value import Value

Pairs = Iterable[tuple[Value, Value]]
"""The place of a value, and its copy on the device."""


def gather(b: Builder, pairs: Pairs, ranks: int) -> None:
    """Emit what brings the parts of all ranks together in whole values, if there are any."""
    by_kind: dict[str, list[tuple[Value, Value]]] = {}
    for part, whole in pairs:
        by_kind.setdefault("all_gather" if part.owner is None else "broadcast", []).append((part, whole))
    for kind, alike in by_kind.items():
        parts, wholes = zip(*alike, strict=True)
        shapes = tuple(whole.shape for whole in wholes)
        b.emit(kind, *parts, outs=wholes, lane="comm", world_size=ranks, shapes=shapes)


def take_part(b: Builder, whole: Value, part: Value, ranks: int) -> None:
    """Emit what writes this rank's part of a whole value."""
    if part.owner is None:
        b.emit("take_part", whole, outs=[part], world_size=ranks)
    else:
        b.emit("copy", whole, outs=[part])


class HostCopies:
    """Emits copies between the device and the memory of the host, on lanes of their own.

    places  {value: its place, which the programs use instead}
    direct  whether ops that can use values on the host (`OpDef.uses_host`) use the places themselves

    `copy` returns a new activation that has the contents of a param or state, `fetch` fills the copies, `put` writes
    them to their places, and `wait` waits until these are written, so that the copies give up their memory.
    """

    direct = True

    def __init__(self, places: Mapping[Value, Value]) -> None:
        self.places = places

    def copy(self, b: Builder, value: Value) -> Value:
        copy = b.activation("streamed", value.shape, value.dtype, room=value.room)
        return replace(copy, shard=value.shard) if value.shard else copy

    def fetch(self, b: Builder, pairs: Pairs) -> None:
        for place, copy in pairs:
            b.emit("move", place, outs=[copy], lane="to_device")

    def put(self, b: Builder, pairs: Pairs) -> None:
        for place, copy in pairs:
            b.emit("move", copy, outs=[place], lane="to_host")

    def wait(self, b: Builder, places: Iterable[Value]) -> None:
        if places := list(places):
            b.emit("wait", *places)


class RankParts(HostCopies):
    """The same with gathers of the parts that the ranks hold. Of what is written, each rank keeps its part."""

    direct = False

    def __init__(self, places: Mapping[Value, Value], ranks: int) -> None:
        super().__init__(places)
        self._ranks = ranks

    def copy(self, b: Builder, value: Value) -> Value:
        return b.activation("gathered", value.shape, value.dtype, room=room(value.shape, value.dtype, self._ranks))

    def fetch(self, b: Builder, pairs: Pairs) -> None:
        gather(b, pairs, self._ranks)

    def put(self, b: Builder, pairs: Pairs) -> None:
        for place, copy in pairs:
            take_part(b, copy, place, self._ranks)

    def wait(self, b: Builder, places: Iterable[Value]) -> None:
        """Nothing: parts are taken where other ops compute."""
