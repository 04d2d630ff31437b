"""The inputs of programs on their way to the device.

All inputs lie in one segment, so a micro-step needs one copy. On a GPU the host writes to pinned mirrors of the segment
in turn. It can therefore be MIRRORS micro-steps ahead before it waits for a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..assembly.assembly import Assembly
from ..memory.plan import MemoryPlan
from ..program.value import Value
from .arena import Buffers, view_of

MIRRORS = 4


class Inputs:
    """Write values by name, then `commit`: programs that are enqueued later read them."""

    def __init__(
        self, values: Iterable[Value], memory: MemoryPlan, buffers: Buffers, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Of `values`, those with the role "input" can be written. `stream`: that of the programs; None on a CPU."""
        self._values = {v.name: v for v in values if v.role == "input"}
        self._segment = memory.segments["input"]
        self._target = buffers.segment("input")
        self._stream = stream
        self._turn = 0
        self._dirty = False
        if stream is None:
            self._mirrors = [self._target]
            self._done: list[torch.cuda.Event] = []
        else:
            nbytes = self._segment.nbytes
            self._mirrors = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(MIRRORS)]
            self._done = [torch.cuda.Event() for _ in self._mirrors]
            for event in self._done:
                event.record(stream)  # the first record creates the event

    def write(self, name: str, value: np.ndarray[Any, Any] | float) -> None:
        """Set an input to an array of its shape, or a scalar input to a number."""
        if not self._dirty:
            self._next_mirror()
        value_of = self._values[name]
        view = view_of(self._mirrors[self._turn], self._segment.offsets[value_of], value_of)
        if isinstance(value, np.ndarray):
            view.copy_(torch.from_numpy(value))
        else:
            view.fill_(value)

    def commit(self) -> None:
        """Enqueue the copy of everything written since the last commit."""
        if self._stream is not None and self._dirty:
            with torch.cuda.stream(self._stream):
                self._target.copy_(self._mirrors[self._turn], non_blocking=True)
                self._done[self._turn].record(self._stream)
        self._dirty = False

    def _next_mirror(self) -> None:
        """Turn to the next mirror, once its last copy is done, and start with the contents of the current one."""
        self._dirty = True
        if self._stream is None:
            return
        before, self._turn = self._turn, (self._turn + 1) % len(self._mirrors)
        self._done[self._turn].synchronize()
        self._mirrors[self._turn].copy_(self._mirrors[before])


def write_documents(inputs: Inputs, assembly: Assembly, cu_seqlens: np.ndarray[Any, Any]) -> None:
    """Write the offsets for all variants. Those for fewer documents than the batch has get a part, and do not run."""
    inputs.write(assembly.batch.cu_seqlens.name, cu_seqlens)
    for documents, offsets in assembly.cu_seqlens.items():
        inputs.write(offsets.name, cu_seqlens[: documents + 1])


def one_document_per_row(assembly: Assembly) -> np.ndarray[Any, Any]:
    """Return valid cu_seqlens for running programs before there is a batch."""
    batch = assembly.batch
    tokens = batch.tokens.shape[0]
    offsets = np.full(batch.cu_seqlens.shape, tokens, np.int32)
    rows = np.arange(0, tokens, batch.seq_len, dtype=np.int32)
    offsets[: len(rows)] = rows
    return offsets
