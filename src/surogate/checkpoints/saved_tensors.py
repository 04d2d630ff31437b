"""Reads tensors whose elements are spread over safetensors files, a block at a time.

A process writes those elements of a tensor that its ranks have: a range of them. See `tensor_file.RANGES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from surogate_core.api import HFTensor
from surogate_core.api.regular_file import refuse_special
from surogate_core.errors import ConfigError
from surogate_core.runtime.pieces import Pieces

from .manifest import HashedFile
from .moved_tensors import write_moved
from .tensor_file import RANGES, STORED_AS

BLOCK_BYTES = 16 << 20
"""Bytes of a tensor that are in memory at a time."""

_DTYPES = {name: dtype for dtype, name in STORED_AS.items()}


@dataclass(frozen=True)
class _Range:
    """Elements of a tensor in a file, which are `count` from the byte `at` of the file on."""

    first: int
    count: int
    path: Path
    at: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in files. It is written to another file as it is."""

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    ranges: list[_Range] = field(default_factory=list)
    first = 0

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def path(self) -> Path:
        """The first file that holds some of it."""
        return self.ranges[0].path

    def check(self) -> None:
        """Raise ConfigError if elements are missing, or in two files."""
        at = 0
        self.ranges.sort(key=lambda held: (held.first, held.count))
        for held in self.ranges:
            if held.first < at:
                raise ConfigError(f"{held.path}: {self.name}: element {held.first:,} is in two files. {_DAMAGED}")
            if held.first > at:
                break
            at += held.count
        if at != self.count:
            raise ConfigError(
                f"{self.path.parent}: no file holds element {at:,} of {self.name} {list(self.shape)}. {_DAMAGED}"
            )

    def read_into(self, elements: Pieces) -> None:
        """Copy the elements that a process has of this tensor into them, converting the dtype."""
        at = elements.first
        for target in elements.tensors:
            for first, block in self.read(at, target.numel()):
                target[first - at : first - at + block.numel()].copy_(block)
            at += target.numel()

    def write(self, file: HashedFile) -> None:
        for _, block in self.read(0, self.count):
            file.write(block.view(torch.uint8).numpy().data)

    def read(self, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the first element, elements) for `count` elements from `first` on, in blocks.

        A block is valid until the next one.
        """
        size = self.dtype.itemsize
        memory = memoryview(bytearray(min(count * size, BLOCK_BYTES)))
        for held in self.ranges:
            at, end = max(first, held.first), min(first + count, held.first + held.count)
            if at >= end:
                continue
            try:
                with held.path.open("rb") as file:
                    file.seek(held.at + (at - held.first) * size)
                    while at < end:
                        data = memory[: (end - at) * size]
                        if file.readinto(data) < len(data):
                            raise ConfigError(f"{held.path}: {self.name}: is truncated. {_DAMAGED}")
                        yield at, torch.frombuffer(data, dtype=torch.uint8).view(self.dtype)
                        at += len(data) // size
            except OSError as error:
                raise ConfigError(f"{held.path}: {self.name}: cannot be read: {error.strerror or error}.") from None


@dataclass(frozen=True)
class InRows:
    """A tensor that is saved as rows of its param, to be written as files of models have it."""

    tensor: HFTensor
    saved: SavedTensor
    first = 0

    @property
    def name(self) -> str:
        return self.saved.name

    @property
    def dtype(self) -> torch.dtype:
        return self.saved.dtype

    @property
    def shape(self) -> Sequence[int]:
        return self.tensor.shape

    @property
    def count(self) -> int:
        return prod(self.tensor.shape)

    def write(self, file: HashedFile) -> None:
        width = prod(self.tensor.rows[1:])

        def rows(first: int, count: int) -> Tensor:
            found = torch.empty(count * width, dtype=self.dtype)
            for at, block in self.saved.read(first * width, count * width):
                found[at - first * width :][: block.numel()].copy_(block)
            return found.view(count, *self.tensor.rows[1:])

        write_moved(file, self.tensor, rows)


def read_tensors(paths: Iterable[Path]) -> dict[str, SavedTensor]:
    """Return the tensors of files, by name, from the headers of the files.

    Raises ConfigError, naming file and tensor, for a file that cannot be read, and for tensors of which elements are
    missing, in two files, or of another shape or dtype in another one.
    """
    found: dict[str, SavedTensor] = {}
    for path in paths:
        for name, dtype, shape, held in _contents(path):
            tensor = found.setdefault(name, SavedTensor(name, shape, dtype))
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise ConfigError(
                    f"{path}: {name} is a range of {STORED_AS[dtype]} {shape}, in {tensor.path} of "
                    f"{STORED_AS[tensor.dtype]} {tensor.shape}. {_DAMAGED}"
                )
            tensor.ranges.append(held)
    for tensor in found.values():
        tensor.check()
    return found


_DAMAGED = "The checkpoint is damaged: use another one."


def _contents(path: Path) -> Iterator[tuple[str, torch.dtype, list[int], _Range]]:
    """Yield (tensor, dtype, shape of the whole tensor, its elements in the file)."""
    header, begin = read_header(path)
    try:
        ranges = json.loads(header.pop("__metadata__", {}).get(RANGES, "{}"))
        for name, entry in header.items():
            first, shape = ranges.get(name, (0, entry["shape"]))
            count = prod(entry["shape"])
            if not all(isinstance(n, int) for n in (first, *shape)) or not 0 <= first <= prod(shape) - count:
                raise ValueError(f"{name}: {count} elements from {first} on are not in {shape}")
            yield name, _DTYPES[entry["dtype"]], shape, _Range(first, count, path, begin + entry["data_offsets"][0])
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(f"{path}: its header is not that of a checkpoint ({error}). {_DAMAGED}") from None


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, which the library has checked, and where its data begin."""
    refuse_special(path)
    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from None
    return header, 8 + size
