"""Tensors into a safetensors file, one at a time and hashed on the way: no second copy of them is ever in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .manifest import HashedFile

STORED_AS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
"""What a safetensors header calls each dtype."""


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: `rows`, on whatever device, in the dtype in which it is saved."""

    name: str
    rows: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.rows.numel() * self.dtype.itemsize

    def write(self, file: HashedFile) -> None:
        raw = self.rows.detach().to("cpu", self.dtype).contiguous().view(-1).view(torch.uint8)
        file.write(raw.numpy().data)


def write_safetensors(path: Path, tensors: Iterable[Stored]) -> str:
    """Write `tensors`, sorted by name, and return the file's hash, as the manifest has it.

    The format: length of the header in 8 bytes, little-endian; the header, JSON padded to 8 bytes; the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    ordered = sorted(tensors, key=lambda t: t.name)
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
