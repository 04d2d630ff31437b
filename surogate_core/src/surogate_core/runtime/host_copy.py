"""A snapshot of weights and states between two steps, copied to host memory while the next steps run.

On a GPU the copy runs on a separate stream, after all work enqueued before it. Only programs that write the copied
values, which means the update, wait for it. A copy that takes less time than a forward and backward pass therefore does
not delay a step. On the host only the reader of the copy waits.

Values that the host holds anyway are not copied: they are read where they are, and the thread that enqueues programs
waits before one that writes them until the reader is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from threading import Event

import torch
from torch import Tensor

from ..memory.alignment import align
from ..program.op import Program
from ..program.value import Value
from .arena import Buffers, view_of
from .host_memory import allocate, pin, unpin
from .pieces import Pieces, pieces_of

_GAP_BYTES = 4096
"""Values of a segment with smaller gaps between them, such as those of alignment, are copied together."""


class HostCopy:
    """Host memory for those of `values` that a device holds, allocated once, and pinned for values on a GPU.

    Construct it before the first step, because no device may allocate while several of them run collectives.
    """

    def __init__(
        self,
        buffers: Buffers,
        values: Iterable[Value],
        programs: Mapping[str, Program],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`programs` are all that will run, by name, on `stream` (None on a CPU). Raises NoHostMemory."""
        kept = list(values)
        copied = [value for value in kept if value.place == "device"]
        ranges = list(_ranges(buffers, copied))
        self._memory = allocate(sum(align(source.numel()) for source, _ in ranges))
        self._main, self._rank = stream, buffers.rank
        if stream is not None:
            pin(self._memory, stream.device)
            self._side = torch.cuda.Stream(stream.device)
            self._begun, self._done = torch.cuda.Event(), torch.cuda.Event(blocking=True)
            for event in (self._begun, self._done):
                event.record(stream)  # the first record creates the event
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._views: dict[Value, Tensor] = {}
        at = 0
        for source, members in ranges:
            target = self._memory[at : at + source.numel()]
            self._parts.append((source, target))
            self._views |= {value: view_of(target, offset, value) for value, offset in members}
            at += align(source.numel())
        self._views |= {value: buffers.persistent(value) for value in kept if value.place == "host"}
        self.writers = _writers(programs, copied)
        """Names of the programs that write one of the copied values."""
        self._writers_on_host = _writers(programs, [value for value in kept if value.place == "host"])
        self._pending = False
        self._read = Event()
        self._read.set()

    def take(self) -> None:
        """Copy the values as they are once all work enqueued so far is done; on a CPU immediately.

        Call it on the thread that enqueues programs, when the previous copy is no longer read. The reader calls
        `release`.
        """
        self._read.clear()
        if self._main is None:
            for source, target in self._parts:
                target.copy_(source)
            return
        self._begun.record(self._main)
        self._side.wait_event(self._begun)
        with torch.cuda.stream(self._side):
            for source, target in self._parts:
                target.copy_(source, non_blocking=True)
            self._done.record(self._side)
        self._pending = True

    def before(self, program: str) -> None:
        """Call it before `program` is enqueued. If it writes copied values, the device waits for the copy first.

        If it writes values that the host holds, this waits until `release`.
        """
        if program in self._writers_on_host:
            self._read.wait()
        if self._pending and program in self.writers and self._main is not None:
            self._main.wait_event(self._done)
            self._pending = False

    def wait(self) -> None:
        """Wait on the host until the copy is complete. May be called on any thread."""
        if self._main is not None:
            self._done.synchronize()

    def view(self, value: Value) -> Tensor:
        """Return the copy of a value. Valid from `wait` until `release`."""
        return self._views[value]

    def pieces(self, value: Value) -> Pieces:
        """Return the copied elements of a value. Valid from `wait` until `release`."""
        return pieces_of(value, lambda rank: self.view(value), range(self._rank, self._rank + 1))

    def release(self) -> None:
        """Give up the copy: the values may be written again. May be called on any thread."""
        self._read.set()

    def close(self) -> None:
        """Unpin the memory. Views of it remain valid."""
        if self._main is not None:
            with suppress(RuntimeError):  # a device in an error state, which has been reported already
                self._done.synchronize()
            unpin(self._memory)


class TeamCopy:
    """The copies of the ranks of a process, used as one `HostCopy`. The first rank has the values that are no parts."""

    def __init__(self, copies: Mapping[int, HostCopy], ranks: range) -> None:
        """`copies` are those of the `ranks` of the process that have something to copy."""
        self._copies, self._ranks = copies, ranks

    def wait(self) -> None:
        for copy in self._copies.values():
            copy.wait()

    def pieces(self, value: Value) -> Pieces:
        return pieces_of(value, lambda rank: self._copies[rank].view(value), self._ranks)

    def release(self) -> None:
        for copy in self._copies.values():
            copy.release()


def saved_by(rank: int, values: Iterable[Value]) -> list[Value]:
    """Return those of the values of a run that a rank saves: its parts, and rank 0 also what all ranks have."""
    return [value for value in values if (value.owner in (None, rank) if value.shard else rank == 0)]


def copied_bytes(values: Iterable[Value]) -> int:
    """Return the host memory for a copy of those of `values` that a device holds, without the gaps between them."""
    return sum(value.nbytes for value in values if value.place == "device")


def _writers(programs: Mapping[str, Program], values: Iterable[Value]) -> set[str]:
    written = set(values)
    return {name for name, p in programs.items() if any(v in written for op in p.ops for v in op.written)}


def _ranges(buffers: Buffers, values: Iterable[Value]) -> Iterator[tuple[Tensor, list[tuple[Value, int]]]]:
    """Yield as few ranges of the segments as possible, each with its values and their offsets in the range."""
    by_role: dict[str, list[tuple[int, Value]]] = {}
    for value in values:
        first = buffers.persistent(value).data_ptr() - buffers.segment(value.role).data_ptr()
        by_role.setdefault(value.role, []).append((first, value))
    for role, placed in by_role.items():
        placed.sort(key=lambda pair: pair[0])
        members: list[tuple[Value, int]] = []
        start = end = placed[0][0]
        for first, value in placed:
            if first > end + _GAP_BYTES:
                yield buffers.segment(role)[start:end], members
                start, members = first, []
            members.append((value, first - start))
            end = first + value.nbytes
        yield buffers.segment(role)[start:end], members
