"""The buffers of a run. Every value is a view at its planned offset, on the device or on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ..api import Comm
from ..errors import ProgramError, RunStopped
from ..front_end import called
from ..machine.devices import GIB
from ..memory.alignment import align
from ..memory.plan import MemoryPlan
from ..program.value import Place, Rows, Value
from ..reference.rounding import TORCH_DTYPES
from .host_memory import NoHostMemory, allocate, pin, unpin

_PIECE_BYTES = 64 << 20
"""Bytes that are copied at a time where a copy needs memory of its own."""


class Buffers:
    """The memory of a plan, allocated on one device, and what the plan has on the host.

    `poison` fills the arenas with NaN, which reveals values that are read outside their planned lives. Memory of the
    host is pinned if the device is a GPU. Raises RunStopped if the host has not enough. `rank` says where the parts are
    that lie inside of whole values. `allocate`: (nbytes) -> zeros on the device, uint8 [nbytes]; None: by torch.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        device: str = "cpu",
        *,
        poison: bool = False,
        rank: int = 0,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.rank = rank
        self._plan = plan
        self._on: dict[Place, tuple[_Memory, ...]] = {
            "device": (_on_device(plan, allocate or partial(_zeros, device=self.device)),),
            "host": (),
        }
        self._pinned: Tensor | None = None
        if plan.host is not None:
            whole = _host_memory(plan.host, self.device)
            self._on["host"] += (_divided(plan.host, whole),)
            self._pinned = whole if self.device.type != "cpu" else None
        if poison:
            for memory in self._memories():
                memory.arena.fill_(0xFF)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all segments and the arena on the device."""
        return self._plan.nbytes

    def segment(self, role: str) -> Tensor:
        """Return all bytes on the device of the segment of a role ("param", "grad", "state" or "input")."""
        (memory,) = self._on["device"]
        return memory.segments[role]

    def share(self, comm: Comm, role: str, stream: int) -> None:
        """Replace the values of a role by those of rank 0, on device and host. All ranks call this.

        Parts, which come last in a segment, are left as they are. What is on the host goes by way of the device. Call
        it with `stream` as the current stream.
        """
        for memory in self._memories():
            parts = (at for v, at in memory.plan.segments[role].offsets.items() if v.shard is not None)
            whole = memory.segments[role][: min(parts, default=None)]
            for part in whole.split(_PIECE_BYTES):
                on_device = part if part.device == self.device else part.to(self.device)
                span = on_device.data_ptr(), on_device.numel(), "uint8"
                comm.broadcast([(span, span)], [0], stream)
                if on_device is not part:
                    part.copy_(on_device)

    def persistent(self, value: Value) -> Tensor:
        """Return the view of a param, gradient, state or input, or of this rank's part of one."""
        return view_of(*self._held(value), value)

    def view(self, value: Value, program: str) -> Tensor:
        return view_of(*self._found(value, program), value)

    def address(self, value: Value, program: str) -> int:
        """Return where `view` begins. Binding asks for a hundred thousand of them, and a view takes far longer."""
        memory, offset = self._found(value, program)
        return memory.data_ptr() + offset

    def _found(self, value: Value, program: str) -> tuple[Tensor, int]:
        """Return the memory in which a value is, and its offset."""
        if value.role not in ("act", "staged"):
            return self._held(value)
        memory, offset = self._in_arena(value, program)
        return memory.arena, offset

    def _held(self, value: Value) -> tuple[Tensor, int]:
        held, within = value.inside or value.root, _within_root(value)
        if value.inside and value.owner is None:
            within = self.rank * value.nbytes
        for memory in self._on[value.place]:
            segment = memory.plan.segments.get(value.role)
            if segment is not None and held in segment.offsets:
                return memory.segments[value.role], segment.offsets[held] + within
        raise ProgramError(f"{value!r} is not in the memory plan")

    def scratch(self, program: str, index: int) -> tuple[int, int]:
        """Return (address, bytes) of the workspace of the op at `index` of `program`; (0, 0) if it has none."""
        offset, nbytes = self._plan.arenas[program].workspace.get(index, (0, 0))
        (memory,) = self._on["device"]
        return (memory.arena.data_ptr() + offset, nbytes) if nbytes else (0, 0)

    def kill(self, value: Value, program: str) -> None:
        """Overwrite an activation with NaN, because its life has ended."""
        memory, offset = self._in_arena(value, program)
        memory.arena[offset : offset + value.nbytes] = 0xFF

    def _memories(self) -> Iterator[_Memory]:
        return chain.from_iterable(self._on.values())

    def _in_arena(self, value: Value, program: str) -> tuple[_Memory, int]:
        """Return the memory and the offset of an activation or a staged param."""
        for memory in self._on[value.place]:
            arena = memory.plan.arenas.get(program)
            if arena is not None and value.root in arena.offsets:
                return memory, arena.offsets[value.root] + _within_root(value)
        raise ProgramError(f"{program}: {value!r} is not in the arena plan")

    def close(self) -> None:
        """Unpin memory of the host. Views of it remain valid."""
        if self._pinned is not None:
            unpin(self._pinned)
            self._pinned = None


@dataclass(frozen=True)
class _Memory:
    """The memory of a plan on one place."""

    plan: MemoryPlan
    segments: Mapping[str, Tensor]
    arena: Tensor


def _within_root(value: Value) -> int:
    return value.offset if isinstance(value, Rows) else 0


def _zeros(nbytes: int, device: torch.device) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def _on_device(plan: MemoryPlan, allocate: Callable[[int], Tensor]) -> _Memory:
    segments = {role: allocate(segment.nbytes) for role, segment in plan.segments.items()}
    return _Memory(plan, segments, allocate(plan.arena_bytes))


def _host_memory(plan: MemoryPlan, device: torch.device) -> Tensor:
    """Allocate all of a plan's bytes at once, because pinning takes time per call."""
    try:
        memory = allocate(plan.nbytes)
        if device.type != "cpu":
            pin(memory, device)
    except NoHostMemory as error:
        raise RunStopped(
            f"offloading takes {plan.nbytes / GIB:.1f} GiB of host memory, and {error}. Free it, offload less, or "
            f"lower {called('batch_size')} or {called('seq_len')}."
        ) from None
    return memory


def _divided(plan: MemoryPlan, memory: Tensor) -> _Memory:
    at, segments = 0, {}
    for role, segment in plan.segments.items():
        segments[role] = memory[at : at + segment.nbytes]
        at += segment.nbytes
    return _Memory(plan, segments, memory[at : at + plan.arena_bytes])


def view_of(memory: Tensor, offset: int, value: Value) -> Tensor:
    return memory[offset : offset + value.nbytes].view(TORCH_DTYPES[value.dtype]).view(value.stored_shape)


def wholes_in(memory: Tensor, states: Sequence[Value], held: Callable[[Value], Tensor]) -> Iterator[Tensor]:
    """Yield a view of each state: in `memory`, one after another, of those that ranks divide, `held` of others.

    Raises ProgramError if they do not fit.
    """
    at = 0
    for state in states:
        if state.shard is None:
            yield held(state)
            continue
        whole = replace(state, shape=state.shard.shape, shard=None)
        if at + whole.nbytes > memory.numel():
            raise ProgramError(f"{whole!r} has more bytes than its weight, in whose place it is loaded")
        yield view_of(memory, at, whole)
        at += align(whole.nbytes)


def copy_part(part: Tensor, whole: Tensor, rank: int) -> None:
    """Copy the part of a rank from a whole state. Zeros follow its end."""
    own = part.view(-1).view(torch.uint8)
    given = whole.view(-1).view(torch.uint8)[rank * own.numel() :][: own.numel()]
    own[: given.numel()].copy_(given)
    own[given.numel() :].zero_()
