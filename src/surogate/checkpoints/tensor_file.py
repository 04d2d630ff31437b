"""Writes safetensors files, one tensor at a time, so that no second copy of a model is ever in memory.

The hash of a file is computed while it is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from surogate_core.api import HFTensor
from surogate_core.dtypes import DTYPES
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.pieces import Pieces

from .manifest import HashedFile
from .moved_tensors import write_moved

MAX_SHARD_BYTES = 5_000_000_000

RANGES = "ranges"
"""Key of a file's metadata: JSON, {tensor: [index of its first element here, shape of the whole tensor]} for each
tensor of which the file holds a range. That is stored flat."""

STORED_AS = {TORCH_DTYPES[name]: dtype.file_name for name, dtype in DTYPES.items()} | {
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
"""The name of each dtype in a safetensors header: those of values, and others that models of others hold."""


class Writable(Protocol):
    """A tensor to be written, or the range from its element `first` on: `count` elements."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]:
        """The shape of the whole tensor."""

    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
    def write(self, file: HashedFile) -> None: ...


WritableT = TypeVar("WritableT", bound=Writable)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, or a range of one: its elements, on any device, and the dtype that it is saved in.

    moved  the tensor, if the file has its elements in another order (`HFTensor.layout`)
    """

    name: str
    elements: Pieces
    dtype: torch.dtype
    moved: HFTensor | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Stored:
        """Return a whole tensor, to be saved in its own dtype."""
        return cls(name, Pieces.of(tensor.contiguous()), tensor.dtype)

    @property
    def shape(self) -> Sequence[int]:
        return self.elements.shape if self.moved is None else self.moved.shape

    @property
    def first(self) -> int:
        return self.elements.first

    @property
    def count(self) -> int:
        return self.elements.count

    def write(self, file: HashedFile) -> None:
        if self.moved is not None:
            write_moved(file, self.moved, self._rows)
            return
        for tensor in self.elements.tensors:
            raw = tensor.detach().to("cpu", self.dtype).view(torch.uint8)
            file.write(raw.numpy().data)

    def _rows(self, first: int, count: int) -> Tensor:
        held = self.elements.rows(first, (count, *self.elements.shape[1:]))
        return torch.cat([tensor.detach().to("cpu", self.dtype) for tensor in held.tensors]).view(held.shape)


def nbytes(tensor: Writable) -> int:
    """Return the bytes that a tensor, or a range of one, takes in a file."""
    return tensor.count * tensor.dtype.itemsize


def split_into_shards(tensors: Iterable[WritableT], max_shard_bytes: int) -> list[list[WritableT]]:
    """Return the tensors in shards of at most `max_shard_bytes`, in order. A larger tensor has a shard of its own."""
    shards: list[list[WritableT]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + nbytes(tensor) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes(tensor)
    return shards


def write_safetensors(path: Path, tensors: Iterable[Writable]) -> str:
    """Write `tensors`, the widest dtypes first, so that each is aligned, then by name.

    Return the file's hash, as a manifest holds it.

    The format: length of the header in 8 bytes, little-endian; the header, JSON padded to 8 bytes; the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ranges: dict[str, Any] = {}
    at = 0
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
    for t in ordered:
        shape = list(t.shape)
        if t.count != prod(shape):
            ranges[t.name] = [t.first, shape]
            shape = [t.count]
        header[t.name] = {"dtype": STORED_AS[t.dtype], "shape": shape, "data_offsets": [at, at + nbytes(t)]}
        at += nbytes(t)
    if ranges:
        header["__metadata__"][RANGES] = json.dumps(ranges)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as raw:
        file = HashedFile(raw)
        file.write(len(text).to_bytes(8, "little") + text)
        for t in ordered:
            t.write(file)
    return file.hexdigest()
