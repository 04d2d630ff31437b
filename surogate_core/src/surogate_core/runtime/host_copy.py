"""Weights and states in host memory as they were between two steps, taken while the next ones begin.

On a GPU the copy runs on a stream of its own, behind everything that was enqueued before it. Only a program that writes
what is being copied has to wait for it, which is the update: a copy costs a step nothing that is shorter than its
forward and backward pass. Nobody on the host waits but who reads the copy.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from ..memory.lifetimes import align
from ..program.op import Program
from ..program.value import Value
from ..reference.rounding import TORCH_DTYPES
from .arena import Buffers

_GAP_BYTES = 4096
"""Neighbours in a segment are copied together across gaps as small as those that alignment leaves."""

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every device


class NoHostMemory(Exception):
    """The host memory for a copy cannot be had. The message says why."""


class HostCopy:
    """Host memory for `values`, allocated once: pinned when they are on a GPU, whose programs run on `stream`.

    `programs`: all that will run, by name; `writers` are those that write one of the values. Make it before the first
    step: while several devices sum, none may allocate. Raises NoHostMemory.
    """

    def __init__(
        self,
        buffers: Buffers,
        values: Iterable[Value],
        programs: Mapping[str, Program],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        copied = list(values)
        stretches = list(_stretches(buffers, copied))
        self._memory = _allocate(sum(align(source.numel()) for source, _ in stretches))
        self._main = stream
        if stream is not None:
            _pin(self._memory, stream.device)
            self._side = torch.cuda.Stream(stream.device)
            self._begun, self._done = torch.cuda.Event(), torch.cuda.Event(blocking=True)
            for event in (self._begun, self._done):
                event.record(stream)  # which makes it
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._views: dict[Value, Tensor] = {}
        at = 0
        for source, members in stretches:
            target = self._memory[at : at + source.numel()]
            self._parts.append((source, target))
            self._views |= {value: _view(target, offset, value) for value, offset in members}
            at += align(source.numel())
        of_these = set(copied)
        self.writers = {name for name, p in programs.items() if any(out in of_these for op in p.ops for out in op.outs)}
        self._under_way = False

    def take(self) -> None:
        """Copy the values as they are once everything that is enqueued is done; on a CPU at once.

        Call it where programs are enqueued, and when nobody reads the copy before.
        """
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
        self._under_way = True

    def before(self, program: str) -> None:
        """Call it before `program` is enqueued: if it writes what is being copied, the device lets it wait."""
        if self._under_way and program in self.writers and self._main is not None:
            self._main.wait_event(self._done)
            self._under_way = False

    def wait(self) -> None:
        """Wait on the host until the copy is whole. On any thread."""
        if self._main is not None:
            self._done.synchronize()

    def view(self, value: Value) -> Tensor:
        """A value as it was; good from `wait` until the next `take`."""
        return self._views[value]

    def close(self) -> None:
        """Unpin the memory. What was copied can still be read, by whoever holds a view."""
        if self._main is not None:
            with suppress(RuntimeError):  # a device in error: whoever met the error first has told it
                self._done.synchronize()
            ctypes.CDLL("libcuda.so.1").cuMemHostUnregister(ctypes.c_void_p(self._memory.data_ptr()))


def copied_bytes(values: Iterable[Value]) -> int:
    """Host memory that a copy of `values` takes, but for the gaps between them."""
    return sum(value.nbytes for value in values)


def _stretches(buffers: Buffers, values: Iterable[Value]) -> Iterator[tuple[Tensor, list[tuple[Value, int]]]]:
    """(bytes of a segment, the values in them, each with its first byte there): as few as possible."""
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


def _view(memory: Tensor, offset: int, value: Value) -> Tensor:
    return memory[offset : offset + value.nbytes].view(TORCH_DTYPES[value.dtype]).view(value.shape)


def _allocate(nbytes: int) -> Tensor:
    """Bytes of anonymous memory, in huge pages where the system has them: pinning takes a call a page.

    Not by torch's pinned allocator, which takes the next power of two: 128 GiB for 65.
    """
    try:
        memory = mmap.mmap(-1, max(nbytes, 1))
    except OSError as error:
        raise NoHostMemory(f"the system refuses them ({error.strerror or error})") from None
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pin(memory: Tensor, device: torch.device) -> None:
    """By the driver's own call, whose failure leaves no error behind for the next CUDA call to find."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # which makes the device's context this thread's
        register = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2
        register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        code = register(memory.data_ptr(), memory.numel(), _PORTABLE)
    if code:
        raise NoHostMemory(f"they cannot be pinned (the driver's cuMemHostRegister fails with {code})")
