"""Writes safetensors files, one tensor at a time, so that no second copy of a model is ever in memory.

The hash of a file is computed while it is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..dtypes import DTYPES
from ..reference.rounding import TORCH_DTYPES
from .manifest import HashedFile

MAX_SHARD_BYTES = 5_000_000_000

STORED_AS = {TORCH_DTYPES[name]: dtype.file_name for name, dtype in DTYPES.items()} | {
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
"""The name of each dtype in a safetensors header: those of values, and others that models of others hold."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: `rows`, on any device, and the dtype that it is saved in."""

    name: str
    rows: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.rows.numel() * self.dtype.itemsize

    def write(self, file: HashedFile) -> None:
        raw = self.rows.detach().to("cpu", self.dtype).contiguous().view(-1).view(torch.uint8)
        file.write(raw.numpy().data)


def split_into_shards(tensors: Iterable[Stored], max_shard_bytes: int) -> list[list[Stored]]:
    """Return the tensors in shards of at most `max_shard_bytes`, in order. A larger tensor has a shard of its own."""
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def write_safetensors(path: Path, tensors: Iterable[Stored]) -> str:
    """Write `tensors`, the widest dtypes first, so that each is aligned, then by name.

    Return the file's hash, as a manifest holds it.

    The format: length of the header in 8 bytes, little-endian; the header, JSON padded to 8 bytes; the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
    for t in ordered:
        offsets = [at, at + t.nbytes]
        header[t.name] = {"dtype": STORED_AS[t.dtype], "shape": list(t.rows.shape), "data_offsets": offsets}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as raw:
        file = HashedFile(raw)
        file.write(len(text).to_bytes(8, "little") + text)
        for t in ordered:
            t.write(file)
    return file.hexdigest()
