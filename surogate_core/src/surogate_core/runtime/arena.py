"""The buffers of a run: one allocation per segment. Every value is a view at its planned offset."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ProgramError
from ..memory.plan import MemoryPlan
from ..program.value import Value
from ..reference.rounding import TORCH_DTYPES


class Buffers:
    """The memory of a plan, allocated on one device.

    `poison` fills the arena with NaN, which reveals values that are read outside their planned lives.
    """

    def __init__(self, plan: MemoryPlan, device: str = "cpu", *, poison: bool = False) -> None:
        self.device = torch.device(device)
        self._plan = plan
        self._segments = {
            role: torch.zeros(segment.nbytes, dtype=torch.uint8, device=self.device)
            for role, segment in plan.segments.items()
        }
        self._arena = torch.full((plan.arena_bytes,), 0xFF if poison else 0, dtype=torch.uint8, device=self.device)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all segments and the arena."""
        return self._arena.numel() + sum(s.numel() for s in self._segments.values())

    def segment(self, role: str) -> Tensor:
        """Return all bytes of the segment of a role: "param", "grad", "state" or "input"."""
        return self._segments[role]

    def persistent(self, value: Value) -> Tensor:
        """Return the view of a param, gradient, state or input."""
        segment = self._plan.segments.get(value.role)
        if segment is None or value not in segment.offsets:
            raise ProgramError(f"{value!r} is not in the memory plan")
        return _view(self._segments[value.role], segment.offsets[value], value)

    def view(self, value: Value, program: str) -> Tensor:
        """Return the view of any value that `program` uses."""
        if value.role not in ("act", "staged"):
            return self.persistent(value)
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
        raw = self._plan.arenas[program].offsets[value]
        self._arena[raw : raw + value.nbytes] = 0xFF


def _view(memory: Tensor, offset: int, value: Value) -> Tensor:
    return memory[offset : offset + value.nbytes].view(TORCH_DTYPES[value.dtype]).view(value.shape)
