"""Cached files that are proved by hashes of their pieces, each of which is verified before it is first read.

A cache of 100 GB cannot be read at every start, and one hash of it proves nothing before its last byte is read. A piece
is 64 KiB: about what the system reads at a time for a row of a shuffled dataset. Its hash takes some 10 microseconds,
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from ..errors import RunStopped
from .required import required

PIECE_BYTES = 1 << 16
_READ_BYTES = 1 << 24


class DamagedFile(RunStopped):
    """A cached file differs from what was written. The message names file and bytes, and what to do.

    what: the message without what to do. made_anew: whether the next start makes the file again.
    """

    def __init__(self, what: str, remedy: str, *, made_anew: bool) -> None:
        super().__init__(f"{what}. {remedy}")
        self.what, self.made_anew = what, made_anew


class PieceHashes:
    """XXH3 of each piece of what is written, in order; `bytes` so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole: list[int] = []
        xxhash = required("xxhash", __name__)
        self._new_hash, self._hash_of_whole = xxhash.xxh3_64, xxhash.xxh3_128()
        self._last, self._room = self._new_hash(), PIECE_BYTES

    def update(self, data: bytes | memoryview) -> None:
        left = memoryview(data).cast("B")
        self.bytes += len(left)
        while len(left):
            piece, left = left[: self._room], left[self._room :]
            self._last.update(piece)
            self._room -= len(piece)
            if not self._room:
                self._whole.append(self._last.intdigest())
                self._hash_of_whole.update(self._whole[-1].to_bytes(8, "little"))
                self._last, self._room = self._new_hash(), PIECE_BYTES

    def array(self) -> npt.NDArray[np.uint64]:
        """Return the hashes so far; the last piece may be shorter than the others."""
        return np.array([*self._whole, *self._begun()], "<u8")

    def digest(self) -> str:
        """Return `digest_of` the hashes so far, which proves them."""
        digest = self._hash_of_whole.copy()
        for last in self._begun():
            digest.update(last.to_bytes(8, "little"))
        return digest.hexdigest()

    def _begun(self) -> list[int]:
        return [self._last.intdigest()] if self._room < PIECE_BYTES else []

    def read(self, file: BinaryIO, count: int) -> Self:
        """Add the next `count` bytes of a file, or as many as it has."""
        while count and (data := file.read(min(count, _READ_BYTES))):
            self.update(data)
            count -= len(data)
        return self


def digest_of(hashes: npt.NDArray[np.uint64]) -> str:
    digest: str = required("xxhash", __name__).xxh3_128(np.ascontiguousarray(hashes, "<u8").data).hexdigest()
    return digest


def read_piece_hashes(path: Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, npt.NDArray[np.uint64]]:
    """Return the hashes of the pieces of each of `files`, {name: {"bytes", "pieces": the digest of its hashes}}.

    `path` holds them in this order. Raises OSError if it cannot be read, and ValueError if it is damaged.
    """
    hashes, at, found = np.fromfile(path, "<u8"), 0, {}
    for name, file in files.items():
        own = hashes[at : at + -(-file["bytes"] // PIECE_BYTES)]
        at += len(own)
        if digest_of(own) != file["pieces"]:
            raise ValueError(f"the hashes of {name} differ from what was written")
        found[name] = own
    return found


class ProvenFile:
    """A file and the hashes of its pieces. Safe to use in several threads: a piece is verified at least once."""

    def __init__(
        self,
        path: Path,
        hashes: npt.NDArray[np.uint64],
        items_per_piece: int,
        damaged: Callable[[Path, str], DamagedFile],
    ) -> None:
        """items_per_piece: numbers, or bits, of PIECE_BYTES; a power of two. damaged: (the file, "bytes 0 to 65,536
        differ from ...") -> the error to raise."""
        self._path, self._hashes, self._damaged = path, hashes, damaged
        self._shift = items_per_piece.bit_length() - 1
        self._data = np.memmap(path, np.uint8, "r")
        self._left = np.ones(len(hashes), np.bool_)
        self._any_left = True
        self._hash = required("xxhash", __name__).xxh3_64_intdigest

    def check(self, items: npt.NDArray[np.int64]) -> None:
        """Verify the pieces of these items that have not been. Raises the error of `damaged`."""
        if self._any_left:
            pieces = items >> self._shift
            pieces = pieces[self._left[pieces]]
            if len(pieces):
                self._verify(np.unique(pieces))

    def check_all(self) -> None:
        if self._any_left:
            self._verify(np.flatnonzero(self._left))

    def _verify(self, pieces: npt.NDArray[Any]) -> None:
        for piece in pieces.tolist():
            first = piece * PIECE_BYTES
            data = self._data[first : first + PIECE_BYTES]
            if self._hash(data.data) != int(self._hashes[piece]):
                raise self._damaged(
                    self._path,
                    f"bytes {first:,} to {first + len(data):,} differ from what was written (hash mismatch)",
                )
            self._left[piece] = False
        self._any_left = bool(self._left.any())
