"""Spans: their parts, and the tensors at their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...api import Span
from ...api.world import REDUCIBLE
from ...dtypes import DTYPES
from ...errors import ProgramError
from ...reference.rounding import TORCH_DTYPES

_ALIGNMENT = 16
"""torch 2.11 reads bf16 that it converts 16 bytes at a time without a look at the address."""


def nbytes(span: Span) -> int:
    return DTYPES[span[2]].nbytes(span[1])


def part(span: Span, index: int, parts: int) -> Span:
    """Return one of `parts` equal parts. Raises ProgramError if they would not begin at bytes."""
    address, elements, dtype = span
    size = elements // parts
    if elements % parts or size * DTYPES[dtype].bits % 8:
        raise ProgramError(f"a collective divides {elements} elements of {dtype} into {parts} equal parts of bytes")
    return address + index * DTYPES[dtype].nbytes(size), size, dtype


CHUNK = 128
"""Chunks have a multiple of this number of elements, so that all of an aligned span are aligned."""


def chunk(span: Span, index: int, parts: int) -> Span:
    """Return one of `parts` chunks, the last of which may be shorter or empty. The dtype is not packed."""
    address, elements, dtype = span
    size = -(-elements // (parts * CHUNK)) * CHUNK
    start = min(index * size, elements)
    return address + start * DTYPES[dtype].nbytes(1), min(size, elements - start), dtype


def check_pairs(name: str, spans: Sequence[tuple[Span, Span]], first: int, second: int) -> None:
    """Raise ProgramError unless the spans of each pair are `first` and `second` parts of one size and dtype."""
    for source, target in spans:
        if source[1] * second != target[1] * first or source[2] != target[2]:
            raise ProgramError(
                f"{name}: from {source[1]} elements of {source[2]} to {target[1]} of {target[2]}; expected the same "
                f"dtype and sizes as {first} to {second}"
            )


def check_reducible(name: str, spans: Sequence[Span]) -> None:
    """Raise ProgramError for a dtype whose values cannot be combined."""
    for _, _, dtype in spans:
        if dtype not in REDUCIBLE:
            raise ProgramError(f"{name} combines only {', '.join(sorted(REDUCIBLE))}, not {dtype}")


def tensor(span: Span, stream: int) -> Tensor:
    """Return the memory of a span: of the host if `stream` is 0, otherwise of a GPU. Packed elements are bytes."""
    size = nbytes(span)
    if not size:
        return torch.empty(0, dtype=TORCH_DTYPES[span[2]])
    if stream:
        return torch.as_tensor(_OnGpu(span[0], size)).view(TORCH_DTYPES[span[2]])
    memory = (ctypes.c_uint8 * size).from_address(span[0])
    return torch.frombuffer(memory, dtype=torch.uint8).view(TORCH_DTYPES[span[2]])


def aligned(x: Tensor) -> Tensor:
    """Return a tensor, or a copy of it, at an address of which torch's kernels for GPUs can convert the dtype."""
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.view(torch.uint8).clone().view(x.dtype)


def copy(target: Span, source: Span, stream: int) -> None:
    """Copy between spans of one size, on the current stream (`current`). Nothing if they are the same."""
    if target[0] != source[0]:
        to, given = (tensor(span, stream).view(torch.uint8) for span in (target, source))
        to.copy_(given, non_blocking=True)


def clear(span: Span, first: int, stream: int) -> None:
    """Write zeros to the elements from `first` on, if there are any, on the current stream."""
    if first < span[1]:
        tensor(span, stream).view(torch.uint8)[DTYPES[span[2]].nbytes(first) :].zero_()


def current(stream: int, device: int) -> AbstractContextManager[object]:
    """Make a stream that is given by its address torch's current one. Nothing on a CPU, whose stream is 0."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device)) if stream else nullcontext()


class _OnGpu:
    """Bytes on a GPU for `torch.as_tensor`, which finds out on which one."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
