"""The buffers of a run: one allocation per segment, every value a view at its planned offset."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ProgramError
from ..memory.plan import MemoryPlan
from ..program.value import Value
from ..reference.rounding import TORCH_DTYPES


class Buffers:
    """Allocates a plan's segments on one device and hands out views.

    `poison` fills the arena with NaN bit patterns, so that a value read outside its planned life shows.
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
        """Bytes allocated, all segments and the arena together."""
        return self._arena.numel() + sum(s.numel() for s in self._segments.values())

    def segment(self, role: str) -> Tensor:
        """All bytes of the params, gradients, states or inputs."""
        return self._segments[role]

    def persistent(self, value: Value) -> Tensor:
        """The view of a param, gradient, state or input."""
        segment = self._plan.segments.get(value.role)
        if segment is None or value not in segment.offsets:
            raise ProgramError(f"{value!r} has no place in the memory plan")
        return _view(self._segments[value.role], segment.offsets[value], value)

    def view(self, value: Value, program: str) -> Tensor:
        """The view of any value that `program` touches."""
        if value.role != "act":
            return self.persistent(value)
        offset = self._plan.arenas[program].offsets.get(value)
        if offset is None:
            raise ProgramError(f"{program}: {value!r} has no place in the arena plan")
        return _view(self._arena, offset, value)

    def scratch(self, program: str, index: int) -> tuple[int, int]:
        """(address, bytes) of the scratch of the op at `index` of `program`; (0, 0) without any."""
        offset, nbytes = self._plan.arenas[program].workspace.get(index, (0, 0))
        return (self._arena.data_ptr() + offset, nbytes) if nbytes else (0, 0)

    def kill(self, value: Value, program: str) -> None:
        """Overwrite an arena value with NaN bit patterns: nobody may read it again."""
        raw = self._plan.arenas[program].offsets[value]
        self._arena[raw : raw + value.nbytes] = 0xFF


def _view(memory: Tensor, offset: int, value: Value) -> Tensor:
    return memory[offset : offset + value.nbytes].view(TORCH_DTYPES[value.dtype]).view(value.shape)
