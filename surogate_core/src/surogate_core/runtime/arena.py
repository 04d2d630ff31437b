"""The buffers of a run: one allocation per segment. Every value is a view at its planned offset."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ProgramError, RunStopped
from ..machine.devices import GIB
from ..memory.plan import MemoryPlan
from ..program.value import Value
from ..reference.rounding import TORCH_DTYPES
from .host_memory import NoHostMemory, allocate, pin, unpin


class Buffers:
    """The memory of a plan, allocated on one device, and what the plan has on the host.

    `poison` fills the arena with NaN, which reveals values that are read outside their planned lives. Memory of the
    host is pinned if the device is a GPU. Raises RunStopped if the host has not enough.
    """

    def __init__(self, plan: MemoryPlan, device: str = "cpu", *, poison: bool = False) -> None:
        self.device = torch.device(device)
        self._plan = plan
        sizes = {role: segment.nbytes for role, segment in plan.segments.items()}
        self._segments = {
            role: torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for role, nbytes in sizes.items()
        }
        self._arena = torch.full((plan.arena_bytes,), 0xFF if poison else 0, dtype=torch.uint8, device=self.device)
        self.host = None if plan.host is None else _HostBuffers(plan.host, self.device, poison)
        """The values that are placed on the host."""

    def close(self) -> None:
        """Unpin memory of the host. Views of it remain valid."""
        if self.host is not None:
            self.host.close()

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all segments and the arena on the device."""
        return self._arena.numel() + sum(s.numel() for s in self._segments.values())

    def segment(self, role: str) -> Tensor:
        """Return all bytes of the segment of a role: "param", "grad", "state" or "input"."""
        return self._segments[role]

    def persistent(self, value: Value) -> Tensor:
        """Return the view of a param, gradient, state or input."""
        if value.place == "host" and self.host is not None:
            return self.host.persistent(value)
        segment = self._plan.segments.get(value.role)
        if segment is None or value not in segment.offsets:
            raise ProgramError(f"{value!r} is not in the memory plan")
        return _view(self._segments[value.role], segment.offsets[value], value)

    def view(self, value: Value, program: str) -> Tensor:
        """Return the view of any value that `program` uses."""
        if value.role not in ("act", "staged"):
            return self.persistent(value)
        if value.place == "host" and self.host is not None:
            return self.host.view(value, program)
        offset = self._plan.arenas[program].offsets.get(value)
        if offset is None:
            raise ProgramError(f"{program}: {value!r} is not in the arena plan")
        return _view(self._arena, offset, value)

    def scratch(self, program: str, index: int) -> tuple[int, int]:
        """Return (address, bytes) of the workspace of the op at `index` of `program`; (0, 0) if it has none."""
        offset, nbytes = self._plan.arenas[program].workspace.get(index, (0, 0))
        return (self._arena.data_ptr() + offset, nbytes) if nbytes else (0, 0)

    def kill(self, value: Value, program: str) -> None:
        """Overwrite an activation with NaN, because its life has ended."""
        if value.place == "host" and self.host is not None:
            return self.host.kill(value, program)
        raw = self._plan.arenas[program].offsets[value]
        self._arena[raw : raw + value.nbytes] = 0xFF


class _HostBuffers(Buffers):
    """The memory of a plan on the host, pinned for `device` if that is a GPU."""

    def __init__(self, plan: MemoryPlan, device: torch.device, poison: bool) -> None:
        self.device = torch.device("cpu")
        self.host = None
        self._plan = plan
        self._is_pinned = False
        try:
            self._all = allocate(plan.nbytes)
            if device.type != "cpu":
                pin(self._all, device)
                self._is_pinned = True
        except NoHostMemory as error:
            raise RunStopped(
                f"offloading takes {plan.nbytes / GIB:.1f} GiB of host memory, and {error}. Free it, offload less, or "
                "lower per_device_train_batch_size or sequence_len."
            ) from None
        at, self._segments = 0, {}
        for role, segment in plan.segments.items():
            self._segments[role] = self._all[at : at + segment.nbytes]
            at += segment.nbytes
        self._arena = self._all[at : at + plan.arena_bytes]
        if poison:
            self._arena.fill_(0xFF)

    def close(self) -> None:
        if self._is_pinned:
            unpin(self._all)


def _view(memory: Tensor, offset: int, value: Value) -> Tensor:
    return memory[offset : offset + value.nbytes].view(TORCH_DTYPES[value.dtype]).view(value.shape)
